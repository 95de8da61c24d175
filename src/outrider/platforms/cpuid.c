/* The features of an x86 processor that its system has enabled, for Windows, which has no list of them. A wheel ships it
 * compiled (setup.py); processor.py reads it. Bits are numbered in the order of CPUID_FEATURES there. */
#include <cpuid.h>
#include <stdint.h>

#define AVX_STATE 0x6u     /* of XCR0: the registers that the system saves for a thread */
#define AVX512_STATE 0xe6u

static uint32_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

#ifdef _WIN32
__declspec(dllexport)
#endif
uint32_t outrider_cpu_features(void) {
    uint32_t a, b, c, d, features = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* OSXSAVE: the system saves states */
    const uint32_t state = saved_state();
    if ((state & AVX_STATE) != AVX_STATE) return 0;
    features |= (c >> 29 & 1) << 0; /* F16C */
    features |= (c >> 12 & 1) << 1; /* FMA */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
    const uint32_t subleaves = a;
    features |= (b >> 5 & 1) << 2; /* AVX2 */
    if ((state & AVX512_STATE) == AVX512_STATE) {
        features |= (b >> 16 & 1) << 3; /* AVX512F */
        features |= (b >> 30 & 1) << 4; /* AVX512BW */
        features |= (b >> 31 & 1) << 5; /* AVX512VL */
        features |= (b >> 17 & 1) << 6; /* AVX512DQ */
        features |= (c >> 11 & 1) << 7; /* AVX512_VNNI */
    }
    if (subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return features;
    if ((state & AVX512_STATE) == AVX512_STATE) features |= (a >> 5 & 1) << 8; /* AVX512_BF16 */
    features |= (a >> 4 & 1) << 9; /* AVX_VNNI */
    return features;
}

#ifdef CPUID_PROGRAM /* tests/systems/kernels.py: what it says under Wine */
#include <stdio.h>
int main(void) {
    printf("%u\n", outrider_cpu_features());
    return 0;
}
#endif
