/* Memory for one call: pieces of a few blocks, freed together. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define ARENA_BLOCK_BYTES 65536 /* of a block, unless one piece is larger */

typedef struct ArenaBlock {
    struct ArenaBlock *before;
    size_t bytes;
    _Alignas(16) char data[];
} ArenaBlock;

typedef struct {
    ArenaBlock *newest;
    size_t used; /* of the newest block */
    int failed;  /* some piece is NULL */
} Arena;

static void *arena_take(Arena *arena, size_t bytes) {
    bytes = (bytes + 15) & ~(size_t)15;
    if (!arena->newest || arena->used + bytes > arena->newest->bytes) {
        const size_t all = bytes > ARENA_BLOCK_BYTES ? bytes : ARENA_BLOCK_BYTES;
        ArenaBlock *block = malloc(sizeof(ArenaBlock) + all);
        if (!block) {
            arena->failed = 1;
            return NULL;
        }
        block->before = arena->newest;
        block->bytes = all;
        arena->newest = block;
        arena->used = 0;
    }
    void *piece = arena->newest->data + arena->used;
    arena->used += bytes;
    return piece;
}
static void arena_free(Arena *arena) {
    while (arena->newest) {
        ArenaBlock *block = arena->newest;
        arena->newest = block->before;
        free(block);
    }
}
/* Room for `count` items of a type. Whether there was any is said by arena->failed, once for many pieces. */
#define NEW(arena, type, count) ((type *)arena_take(arena, (size_t)(count) * sizeof(type)))
