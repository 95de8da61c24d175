// Memory that kernels may touch, and copies that arrive when they are waited for.
#ifndef OUTRIDER_MEMORY
#define OUTRIDER_MEMORY
#include "threads.h"

namespace machine {

inline const Buffer* buffer_of(const void* at, u64 bytes) {
    for (u32 i = 0; i < the.buffer_count; i++) {
        const Buffer& b = the.buffers[i];
        if ((char*)at >= b.at && (char*)at + bytes <= b.at + b.bytes) return &b;
    }
    return nullptr;
}

inline void outside(const void* at, const char* what) {
    i64 best = 1 << 20;
    int which = -1, past = 0;
    for (u32 i = 0; i < the.buffer_count; i++) {
        const Buffer& b = the.buffers[i];
        const i64 before = b.at - (char*)at, behind = (char*)at - (b.at + (i64)b.bytes);
        if (before > 0 && before < best) best = before, which = i, past = 0;
        if (behind >= 0 && behind < best) best = behind, which = i, past = 1;
        if (before <= 0 && behind < 0) best = -behind, which = i, past = 2;
    }
    static const char* const texts[] = {
        "%s %lld bytes ahead of buffer %d of %llu bytes", "%s %lld bytes behind the end of buffer %d of %llu bytes",
        "%s across the end, %lld bytes on, of buffer %d of %llu bytes"};
    if (which < 0) fail("%s at %p, which is in no buffer", what, at);
    fail(texts[past], what, (long long)best, which, the.buffers[which].bytes);
}

inline void check_ahead(const Buffer& b, bool reads, const char* what) {
    if (!the.overlaps || the.now->alone >= (reads ? 2 * (int)b.ahead : 1)) return;
    fail("%s buffer %d of %llu bytes before it has waited for the kernel ahead", what, (int)(&b - the.buffers), b.bytes);
}

inline void touch_all(Shadow& s, u64 at, u64 bytes, bool writes, const char* what) {
    if (bytes < s.grain) return;  // bytes one by one: several threads may have the same word
    for (u64 word = at / s.grain, end = (at + bytes) / s.grain; word < end; word++) touch(s, word, writes, what);
}

inline void check_global(const void* at, u64 aligned, u64 bytes, const char* what, Access access) {
    if ((uintptr_t)at % aligned) fail("%s of %llu bytes at %p, which is not aligned", what, bytes, at);
    const Buffer* b = buffer_of(at, bytes);
    if (!b) outside(at, what);
    check_ahead(*b, access == READS, what);
    stir();
    Shadow& s = the.shadows[b - the.buffers];
    const u64 offset = (char*)at - b->at;
    if (access != ADDS) return touch_all(s, offset, bytes, access == WRITES, what);
    for (u64 word = offset / s.grain, end = (offset + bytes) / s.grain; word < end; word++) look_back(s, word, what);
}

inline char* shared_at(u32 at, u32 bytes, const char* what) {
    if (at % bytes) fail("%s of %u bytes of shared memory at %u, which is not aligned", what, bytes, at - ROOM_AT);
    const i64 byte = (i64)at - ROOM_AT;
    if (byte < 0 || byte + bytes > the.shared) fail("%s at byte %lld of %u of shared memory", what, byte, the.shared);
    return the.here->room + (at - ROOM_AT);
}

inline char* touch_shared(u32 at, u32 bytes, const char* what, Access access) {
    stir();
    char* place = shared_at(at, bytes, what);
    for (u32 i = 0; i < bytes; i += 4) {
        const u32 word = (at - ROOM_AT + i) / 4;
        if (the.here->flying[word]) fail("%s byte %u of shared memory, which a copy is still on its way to", what, at - ROOM_AT + i);
        if (access == WRITES && the.here->held[word]) fail("%s byte %u of shared memory, which a product still reads", what, at - ROOM_AT + i);
        touch(the.here->shadow, word, access == WRITES, what);
    }
    return place;
}

void begin_copy(u32 to, const char* from, int bytes, int read) {
    Fiber& f = *the.now;
    if (read) check_global(from, bytes, read, "copies", READS);
    touch_shared(to, bytes, "copies over", WRITES);
    for (int i = 0; i < bytes; i += 4) the.here->flying[(to - ROOM_AT + i) / 4]++;
    if (f.copying == f.copies_room) f.copies = (Copy*)realloc(f.copies, (f.copies_room = 2 * f.copies_room + 16) * sizeof(Copy));
    f.copies[f.copying++] = {to, from, bytes, read, f.group};
}

void end_group() { the.now->group++; }

void end_copies(int open) {
    Fiber& f = *the.now;
    int kept = 0;
    for (int i = 0; i < f.copying; i++) {
        const Copy& c = f.copies[i];
        if (c.group >= f.group - open) {
            f.copies[kept++] = c;
            continue;
        }
        char* to = shared_at(c.to, c.bytes, "copies");
        memset(to, 0, c.bytes);
        memcpy(to, c.from, c.read);
        for (int j = 0; j < c.bytes; j += 4) the.here->flying[(c.to - ROOM_AT + j) / 4]--, note_write(the.here->shadow, (c.to - ROOM_AT + j) / 4);
    }
    f.copying = kept;
    stir();
}

void read_global(const void* at, void* v, u32 bytes) {
    check_global(at, bytes, bytes, "reads", READS);
    memcpy(v, at, bytes);
}

void write_global(void* at, const void* v, u32 bytes) {
    check_global(at, bytes, bytes, "writes", WRITES);
    memcpy(at, v, bytes);
}

void look_global(const void* at, void* v, u32 bytes) {
    spin();
    check_global(at, bytes, bytes, "looks", ADDS);
    take_along(at);
    memcpy(v, at, bytes);
}

void begin_adding(void* at, void* v, u32 bytes) {
    check_global(at, bytes, bytes, "adds", ADDS);
    the.spins = 0;
    take_along(at), leave_at(at);
    memcpy(v, at, bytes);
}

void end_adding(void* at, const void* v, u32 bytes) { memcpy(at, v, bytes); }

void read_shared(u32 at, void* v, u32 bytes) { memcpy(v, touch_shared(at, bytes, "reads", READS), bytes); }

void write_shared(u32 at, const void* v, u32 bytes) { memcpy(touch_shared(at, bytes, "writes", WRITES), v, bytes); }

// A plain load or store of the kernel: of a buffer, of the bytes around it, of a shared variable, or of something that is the thread's own.
inline void plain(const void* address, u32 bytes, bool writes) {
    const char *at = (const char*)address, *what = writes ? "writes" : "reads";
    if (!the.now || (u64)(at - the.now->stack) < STACK) return;
    if (at >= the.variables && at < the.variables_end) return touch_all(the.here->variables_shadow, at - the.variables, bytes, writes, what);
    for (u32 i = 0; i < the.buffer_count; i++) {
        const Buffer& b = the.buffers[i];
        if (at < (char*)((uintptr_t)b.at & -PAGE) || at >= b.at + (b.bytes + 15) / 16 * 16) continue;
        if (at < b.at || at + bytes > b.at + b.bytes) outside(at, what);
        check_ahead(b, !writes, what);
        return touch_all(the.shadows[i], at - b.at, bytes, writes, what);
    }
}

}  // namespace machine
#endif
