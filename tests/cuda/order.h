// What comes before what. Two threads touch the same word, one of them writes, and neither a barrier nor a flag orders the two: an error, in
// whatever order they happen to run here.
//
// A thread counts its stretches between two barriers (`clock`). A warp knows of each thread up to which stretch all that it did has happened.
// A barrier gives all warps that meet what any of them knew; `__syncwarp` does so for the lanes of a warp, and nothing else does: not a
// shuffle, not a matrix instruction. Whoever adds to a flag leaves there what it knows, whoever looks at it afterwards takes that along.
#ifndef OUTRIDER_ORDER
#define OUTRIDER_ORDER
#include "parts.h"

namespace machine {

Machine the;

__attribute__((noinline, noreturn)) void fail(const char* text, ...) {
    char line[400];
    va_list more;
    va_start(more, text);
    vsnprintf(line, sizeof line, text, more);
    va_end(more);
    if (the.now) snprintf(the.message, the.message_room, "block %u, thread %d: %s", the.now->block->index, the.now->thread, line);
    else snprintf(the.message, the.message_room, "%s", line);
    _longjmp(the.home, 2);
}

inline void* room_for(u64 bytes) {  // zeros, until the launch ends
    void** room = (void**)calloc(1, bytes + 64);
    if (!room) fail("no memory");
    *room = the.owned, the.owned = room;
    return room + 2;
}

constexpr u32 SEVERAL = 33, SEVERAL_WARPS = ~0u;

inline void widen(u32* known, const u32* more) {
    for (u32 i = 0; i < the.resident * the.threads; i++) known[i] = known[i] > more[i] ? known[i] : more[i];
}

inline u32* nothing_known() { return (u32*)room_for(the.resident * the.threads * 4); }

inline bool knows(const Fiber& f, u32 id, u32 clock) {
    return id == f.id || f.warp->known[id] >= clock || (f.taken_along && f.taken_along[id] >= clock);
}

inline void order_all(Fiber** fibers, int count) {  // they have met
    const size_t bytes = the.resident * the.threads * 4;
    u32 clock = 0, *joint = fibers[0]->warp->known;
    the.meetings++;
    for (int i = 0; i < count; i++) {
        Fiber& f = *fibers[i];
        clock = f.clock > clock ? f.clock : clock;
        if (f.warp->known != joint && f.warp->meeting_number != the.meetings) widen(joint, f.warp->known);
        f.warp->meeting_number = the.meetings;
        if (f.has_taken) widen(joint, f.taken_along), memset(f.taken_along, 0, bytes), f.has_taken = false;
    }
    int alone = 0;
    for (int i = 0; i < count; i++) alone = fibers[i]->alone > alone ? fibers[i]->alone : alone;
    for (int i = 0; i < count; i++) joint[fibers[i]->id] = clock, fibers[i]->clock = clock + 1, fibers[i]->alone = alone;
    for (int i = 0; i < count; i++) {
        Warp& w = *fibers[i]->warp;
        if (w.known != joint && w.meeting_number == the.meetings) memcpy(w.known, joint, bytes), w.meeting_number = 0;
    }
}

inline Flag& flag_at(const void* at) {
    Flag*& first = the.flags[(uintptr_t)at / 4 % FLAGS];
    for (Flag* f = first; f; f = f->next)
        if (f->at == at) return *f;
    Flag* made = (Flag*)room_for(sizeof(Flag));
    made->at = at, made->known = nothing_known(), made->next = first;
    return *(first = made);
}

inline void take_along(const void* at) {  // what was left at a flag
    Fiber& f = *the.now;
    if (!f.taken_along) f.taken_along = nothing_known();
    widen(f.taken_along, flag_at(at).known), f.has_taken = true;
}

inline void leave_at(const void* at) {
    Fiber& f = *the.now;
    u32* known = flag_at(at).known;
    widen(known, f.warp->known);
    if (f.has_taken) widen(known, f.taken_along);
    known[f.id] = f.clock++;
}

__attribute__((noinline)) inline void clash(const Shadow& s, u32 word, const char* what, const char* before, u32 id) {
    const Fiber& other = the.fibers[id];
    char where[60];
    if (s.buffer < 0) snprintf(where, sizeof where, "byte %u of shared %s", word * s.grain, s.buffer == -1 ? "memory" : "variables");
    else snprintf(where, sizeof where, "byte %u of buffer %d", word * s.grain, s.buffer);
    if (other.block == the.now->block) fail("%s %s, which thread %d %s: nothing says in which order", what, where, other.thread, before);
    fail("%s %s, which thread %d of block %u %s: nothing says in which order", what, where, other.thread, other.block->index, before);
}

inline void note_write(Shadow& s, u32 word) {
    Word& w = s.words[word];
    w.by = the.now->id + 1, w.clock = the.now->clock, w.shown = the.now->shown;
}

inline void look_back(const Shadow& s, u32 word, const char* what) {  // at whoever wrote last
    const Word& w = s.words[word];
    if (w.by && !knows(*the.now, w.by - 1, w.clock)) clash(s, word, what, "wrote", w.by - 1);
}

inline int unknown_reader(const Fiber& f, u32 warp, u32 read) {  // -1: all of these reads are known to be done
    const Warp& w = *the.warps[warp];
    for (int lane = 0; lane < w.size; lane++)
        if (((read & 63) == SEVERAL || (int)(read & 63) == lane + 1) && !knows(f, w.lanes[lane]->id, read >> 6)) return w.lanes[lane]->id;
    return -1;
}

inline u32& read_of(Shadow& s, u32 warp, u32 word) {
    u32*& all = s.reads[warp - s.first_warp];
    if (!all) all = (u32*)room_for(s.count * 4);
    return all[word];
}

inline void note_read(Shadow& s, u32 word) {
    Fiber& f = *the.now;
    Word& w = s.words[word];
    const u32 me = f.warp->index + 1, lane = f.lane + 1;
    if (w.reader && w.reader != me && w.reader != SEVERAL_WARPS) {
        if (unknown_reader(f, w.reader - 1, w.read) < 0) w.reader = 0;  // whoever writes after this read writes after that one
        else read_of(s, w.reader - 1, word) = w.read, w.reader = SEVERAL_WARPS;
    }
    if (!w.reader) w.reader = me, w.read = 0;
    u32& e = w.reader == me ? w.read : read_of(s, me - 1, word);
    const u32 who = e & 63, clock = e >> 6;
    const bool open = who && who != lane && (who == SEVERAL ? clock >= f.clock : !knows(f, f.warp->lanes[who - 1]->id, clock));
    e = (clock > f.clock && open ? clock : f.clock) << 6 | (open ? SEVERAL : lane);
}

inline void touch(Shadow& s, u32 word, bool writes, const char* what) {
    s.used = true;
    look_back(s, word, what);
    if (!writes) return note_read(s, word);
    Word& w = s.words[word];
    auto check = [&](u32 warp, u32& read) {
        const int id = read ? unknown_reader(*the.now, warp, read) : -1;
        if (id >= 0) clash(s, word, what, "read", id);
        read = 0;
    };
    if (w.reader == SEVERAL_WARPS) {
        for (u32 v = 0; v < s.warps; v++)
            if (s.reads[v]) check(s.first_warp + v, s.reads[v][word]);
    } else if (w.reader) check(w.reader - 1, w.read);
    w.reader = 0;
    note_write(s, word);
}

inline void make_shadow(Shadow& s, int buffer, u32 grain, u64 bytes, u32 first_warp, u32 warps) {
    s.buffer = buffer, s.grain = grain, s.count = bytes / grain + 1, s.first_warp = first_warp, s.warps = warps;
    s.words = (Word*)room_for(s.count * sizeof(Word)), s.reads = (u32**)room_for(warps * sizeof(u32*));
}

inline void forget(Shadow& s) {
    if (!s.used) return;
    memset(s.words, 0, s.count * sizeof(Word));
    for (u32 v = 0; v < s.warps; v++)
        if (s.reads[v]) memset(s.reads[v], 0, s.count * 4);
    s.used = false;
}

}  // namespace machine
#endif
