// litmus NAME right|wrong HOST FILE: what two hosts may see of each other. Exits with 1 if they saw what they must not.
// Each test leaves out one thing where it is wrong.
#include <fcntl.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ROUNDS = 100 };
typedef struct { volatile uint64_t word[8]; } Line;
static Line *lines;
static int host, right;

static void write_back(Line *line) { _mm_clwb((void *)line); _mm_sfence(); }
static void invalidate(Line *line) { _mm_clflushopt((void *)line); _mm_mfence(); }

// Waits until both hosts have come as far.
static void meet(uint64_t step) {
    lines[host].word[0] = step;
    write_back(&lines[host]);
    do invalidate(&lines[1 - host]); while (lines[1 - host].word[0] < step);
}

// Host 0 publishes a payload; the meeting is its flag. Returns whether host 1 sees another.
static int publish(uint64_t round, void (*store)(Line *, uint64_t), int writes_back, int invalidates) {
    Line *payload = &lines[8];
    if (host == 0) { store(payload, round); if (writes_back) write_back(payload); }
    meet(2 * round);
    if (host == 1 && invalidates) invalidate(payload);
    int bad = host == 1 && (payload->word[0] != round || payload->word[7] != round);
    meet(2 * round + 1);
    return bad;
}

static void plain(Line *line, uint64_t value) { line->word[0] = line->word[7] = value; }
static void around(Line *line, uint64_t value) {
    _mm_stream_si64((long long *)&line->word[0], value);
    _mm_stream_si128((__m128i *)&line->word[6], _mm_set1_epi64x(value));
    _mm_sfence();
}
__attribute__((target("avx"))) static void halves(Line *line, uint64_t value) {
    for (int k = 0; k < 8; k += 4) _mm256_stream_si256((__m256i *)&line->word[k], _mm256_setr_epi64x(value, 0, 0, value));
    _mm_sfence();
}
__attribute__((target("avx512f"))) static void whole_vector(Line *line, uint64_t value) {
    _mm512_stream_si512((void *)line, _mm512_setr_epi64(value, 0, 0, 0, 0, 0, 0, value));
    _mm_sfence();
}
// In one store where the CPU can, else in two.
static void wide(Line *line, uint64_t value) {
    if (__builtin_cpu_supports("avx512f") && value % 2) whole_vector(line, value); else halves(line, value);
}
// movdir64b rax, [rdi], which compilers of CPUs without it do not have.
static void whole(Line *line, uint64_t value) {
    Line source; for (int k = 0; k < 8; k++) source.word[k] = value;
    __asm__ volatile(".byte 0x66, 0x0f, 0x38, 0xf8, 0x07" : : "a"(line), "D"(&source) : "memory");
    _mm_sfence();
}

// The writer writes the payload back, or does not.
static int write_back_payload(uint64_t round) { return publish(round, plain, right, 1); }
// The reader invalidates the payload before it reads it, or does not.
static int invalidate_payload(uint64_t round) { return publish(round, plain, 1, right); }
// The payload is stored around the caches, or into them.
static int non_temporal(uint64_t round) { return publish(round, right ? around : plain, 0, 1); }
static int non_temporal_wide(uint64_t round) { return publish(round, right ? wide : plain, 0, 1); }
static int whole_line(uint64_t round) { return publish(round, right ? whole : plain, 0, 1); }

// Both hosts announce themselves, then look for the other: one of them sees it, if each writes its announcement back.
static int announce(uint64_t round) {
    Line *own = &lines[16 + 2 * round + host], *other = &lines[16 + 2 * round + 1 - host], *seen = &lines[10 + host];
    own->word[0] = 1;
    if (right) write_back(own);
    invalidate(other);
    seen->word[0] = other->word[0];
    write_back(seen);
    meet(2 * round);
    invalidate(&lines[11 - host]);
    int bad = seen->word[0] == 0 && lines[11 - host].word[0] == 0;
    meet(2 * round + 1);
    return bad;
}

// A line is handed over: host 1 stores to another word of it, after it has invalidated the line, or has not.
static int hand_over(uint64_t round) {
    Line *line = &lines[8];
    if (host == 0) { line->word[0] = round; write_back(line); }
    meet(3 * round);
    if (host == 1) { if (right) invalidate(line); line->word[1] = round; write_back(line); }
    meet(3 * round + 1);
    invalidate(line);
    int bad = line->word[0] != round || line->word[1] != round;
    meet(3 * round + 2);
    return bad;
}

static const struct { const char *name; int (*run)(uint64_t); } tests[] = {
    { "write_back_payload", write_back_payload }, { "invalidate_payload", invalidate_payload }, { "non_temporal", non_temporal },
    { "non_temporal_wide", non_temporal_wide }, { "whole_line", whole_line }, { "announce", announce }, { "hand_over", hand_over },
};

int main(int count, char **words) {
    if (count != 5) return 2;
    right = !strcmp(words[2], "right");
    host = atoi(words[3]);
    int file = open(words[4], O_RDWR), bad = 0;
    lines = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (lines == MAP_FAILED) return 2;
    for (size_t k = 0; k < sizeof tests / sizeof *tests; k++)
        if (!strcmp(tests[k].name, words[1])) {
            for (uint64_t round = 1; round <= ROUNDS; round++) bad += tests[k].run(round);
            printf("host %d: %d of %d rounds wrong\n", host, bad, ROUNDS);
            return bad != 0;
        }
    return 2;
}
