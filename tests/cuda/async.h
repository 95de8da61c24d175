// Hopper's mbarriers, clusters of two blocks, and TMA. What TMA fetches arrives when a thread waits for it; until then nobody may touch its place.
#ifndef OUTRIDER_ASYNC
#define OUTRIDER_ASYNC
#include "products.h"

namespace machine {

struct Fetch { u32 to; Matrix from; int row, column; Fetch* next; u32 bytes; };  // bytes: of adjacent ones; 0: a tile

struct Barrier {
    u32 at, phase;
    int arrivals, missing;
    i64 bytes;
    Fetch* fetches;
    Barrier* next;
};

inline Block& cluster_block(int rank) {  // rank -1: its own
    if (the.blocks > the.resident || the.blocks % 2) fail("clusters of blocks that are not all there");
    const u32 own = the.now->block->index;
    return the.slots[rank < 0 ? own : own / 2 * 2 + rank];
}

inline Barrier& barrier_at(Block& block, u32 at) {
    for (Barrier* b = block.mbarriers; b; b = b->next)
        if (b->at == at) return *b;
    fail("no barrier at byte %u of shared memory", at - ROOM_AT);
}

inline const void* flag_of(Block& block, u32 at) { return block.room + (at - ROOM_AT); }  // for order.h

inline void settle(Barrier& b) {
    if (b.missing || b.bytes) return;
    b.phase++, b.missing = b.arrivals;
}

void barrier_init(u32 at, int arrivals) {
    shared_at(at, 8, "a barrier");
    Barrier* b = (Barrier*)room_for(sizeof(Barrier));
    Block& block = *the.now->block;
    *b = {at, 0, arrivals, arrivals, 0, nullptr, block.mbarriers};
    block.mbarriers = b;
}

void barrier_arrive(u32 at, int rank, i64 bytes) {
    stir();
    Block& block = cluster_block(rank);
    Barrier& b = barrier_at(block, at);
    if (b.missing == 0) fail("one arrival too many at byte %u of shared memory", at - ROOM_AT);
    leave_at(flag_of(block, at));
    the.spins = 0, b.missing--, b.bytes += bytes;
    settle(b);
}

inline i64 row_of(const Matrix& m, i64 row) {  // of a tile: where it is in the matrix
    if (!m.paired) return row;
    const i64 place = row / 16 * 8 + row % 8;
    return place < m.rows / 2 ? place + row / 8 % 2 * (m.rows / 2) : m.rows;
}

inline void deliver(Block& block, Barrier& b) {
    while (Fetch* f = b.fetches) {
        b.fetches = f->next;
        if (f->bytes) memcpy(block.room + (f->to - ROOM_AT), f->from.at, f->bytes);
        for (u32 byte = 0; byte < f->bytes; byte += 4) block.flying[(f->to - ROOM_AT + byte) / 4]--;
        for (i64 r = 0; r < f->from.tile_rows; r++)
            for (int piece = 0; piece < 8; piece++) {
                const u32 linear = f->to + r * 128 + piece * 16, at = linear ^ (linear >> 7 & 7) << 4;
                const i64 row = row_of(f->from, f->row + r), column = f->column + piece * 8, left = row < f->from.rows ? f->from.columns - column : 0;
                char* to = block.room + (at - ROOM_AT);
                memset(to, 0, 16);
                if (left > 0) memcpy(to, f->from.at + (row * f->from.stride + column) * 2, left < 8 ? left * 2 : 16);
                for (int i = 0; i < 4; i++) block.flying[(at - ROOM_AT) / 4 + i]--;
            }
        b.bytes -= f->bytes + f->from.tile_rows * 128;
        the.spins = 0;
        settle(b);
    }
}

void barrier_wait(u32 at, u32 parity) {
    Block& block = *the.now->block;
    Barrier& b = barrier_at(block, at);
    stir();
    for (deliver(block, b); (b.phase & 1) == parity; deliver(block, b)) spin();
    take_along(flag_of(block, at));
}

void meet_cluster() {
    Meeting& m = cluster_block(0).cluster;
    arrive(m, "barrier.cluster");
    if (m.arrived == 2 * (int)the.threads) release(m, true);
    leave();
}

inline void send(Block& block, u32 barrier, i64 bytes, Fetch what) {
    for (u32 byte = what.to - ROOM_AT, end = byte + bytes; byte < end; byte += 4) {
        shared_at(byte + ROOM_AT, 4, "fetches");
        if (block.flying[byte / 4]) fail("fetches over byte %u of shared memory, which a copy is still on its way to", byte);
        if (block.held[byte / 4]) fail("fetches over byte %u of shared memory, which a product still reads", byte);
        touch(block.shadow, byte / 4, true, "fetches over");
        block.shadow.words[byte / 4].shown = ~0u, block.flying[byte / 4]++;  // the matrix units see what TMA writes
    }
    Fetch* f = (Fetch*)room_for(sizeof(Fetch));
    Barrier& b = barrier_at(block, barrier);
    what.next = b.fetches, *f = what, b.fetches = f;
    leave_at(flag_of(block, barrier));
}

void fetch_tile(u32 to, const Matrix& from, u32 barrier, int row, int column, bool all) {
    if (to % 1024) fail("fetches to byte %u of shared memory: not a multiple of 1,024", to - ROOM_AT);
    for (i64 r = row; r < row + from.tile_rows; r++) {
        const i64 left = from.columns - column, place = row_of(from, r);
        if (place < from.rows && left > 0) check_global(from.at + (place * from.stride + column) * 2, 16, left < 64 ? left * 2 : 128, "fetches", READS);
    }
    for (int rank = all ? 0 : -1; rank < (all ? 2 : 0); rank++) send(cluster_block(rank), barrier, from.tile_rows * 128, {to, from, row, column});
}

void fetch_bytes(u32 to, const char* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16) fail("fetches %u bytes to byte %u of shared memory: not multiples of 16", bytes, to - ROOM_AT);
    check_global(from, 16, bytes, "fetches", READS);
    send(cluster_block(-1), barrier, bytes, {to, {from}, 0, 0, nullptr, bytes});
}

}  // namespace machine
#endif
