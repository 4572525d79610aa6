// One optimizer step in one pass: every weight, gradient and state is read and written once.
//
// `native.py` compiles this for the machine it runs on, calls `begin` once a step and `update` from as many threads as torch has,
// each with its part of the values. The rules are those of `compiled.py`, the formats those of `formats/bf16_formats.py`, whose names
// are used here. Loops have no branches, so that a compiler turns them into vector instructions by itself.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

enum Rule { ADAMW, SGD, MOMENTUM, LION };
enum Format { WHOLE, HALF, SPLIT, KAHAN, STOCHASTIC };

// Mirrored by `TENSORS` and `SETTINGS` of native.py.
struct Tensors {
    float* master;        // fp32 weights; null where they exist only around the step
    uint16_t* half;       // bf16 weights
    uint16_t* remainder;  // what they cannot hold: int16 of SPLIT, bf16 of KAHAN
    const void* grad;
    float* first;   // exp_avg, or momentum_buffer
    float* second;  // exp_avg_sq
    float* step;    // counter of AdamW's steps
    int64_t numel;
    int64_t offset;  // of the first value, for STOCHASTIC
    float rates[3];  // lr, and AdamW's lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t); `begin` writes them
    int32_t format;
    int32_t bf16_grad;
};

struct Settings {
    double lr, power1, power2;  // power1, power2: AdamW's betas, whose powers take double precision
    float inverse;  // of the gradients' divisor
    float beta1, rest1, beta2, rest2, eps, weight_decay, momentum;
    uint32_t key;  // of the draws of this step
    int32_t rule, nesterov;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bf16(uint16_t half) { return as_float(uint32_t(half) << 16); }

inline uint16_t to_bf16(float value) {  // to nearest, ties to even
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return uint16_t(value == value ? rounded : 0x7FC0u);
}

inline uint32_t hash(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

constexpr uint32_t GOLDEN = 0x9E3779B1u;
constexpr int64_t DRAWS_OF_BLOCK = int64_t(1) << 17;

template <int RULE>
inline float updated(float w, float g, float& first, float& second, const float* rate, const Settings& s) {
    if (RULE == ADAMW) {
        first = first + s.rest1 * (g - first);
        second = second * s.beta2 + s.rest2 * g * g;
        return w * (1 - rate[0] * s.weight_decay) - rate[1] * first / (std::sqrt(second) * rate[2] + s.eps);
    }
    if (RULE == LION) {
        const float blend = first * s.beta1 + s.rest1 * g;
        const float sign = blend > 0 ? 1.0f : blend < 0 ? -1.0f : blend * 0;  // nan stays nan
        first = first * s.beta2 + s.rest2 * g;
        return w * (1 - rate[0] * s.weight_decay) - rate[0] * sign;
    }
    if (s.weight_decay != 0) g = g + s.weight_decay * w;  // 0 times inf is nan
    if (RULE == MOMENTUM) {
        first = s.momentum * first + g;
        g = s.nesterov ? g + s.momentum * first : first;
    }
    return w - rate[0] * g;
}

// `place` is the index of the value among all of the model's half weights, `factor` that of its block.
inline uint16_t stochastic(float value, uint32_t place, uint32_t key, uint32_t factor) {
    uint32_t word = hash(((place >> 1) & uint32_t(DRAWS_OF_BLOCK / 2 - 1)) ^ key) * factor;
    word ^= word >> 16;
    const uint32_t raw = as_bits(value);
    const uint32_t moved = (raw + ((word >> ((place & 1) * 16)) & 0xFFFF)) >> 16;
    return uint16_t((raw & 0x7F800000u) != 0x7F800000u ? moved : to_bf16(value));
}

template <int RULE, int FORMAT, typename Grad>
void values(const Tensors& t, const Settings& s, int64_t begin, int64_t end, uint32_t factor) {
    float *__restrict master = t.master, *__restrict first = t.first, *__restrict second = t.second;
    uint16_t *__restrict half = t.half, *__restrict remainder = t.remainder;
    const Grad* __restrict grad = static_cast<const Grad*>(t.grad);
    const float rate[3] = {t.rates[0], t.rates[1], t.rates[2]};
    const Settings settings = s;
    for (int64_t i = begin; i < end; ++i) {
        float old, g, m = 0, v = 0;
        if (FORMAT == WHOLE || FORMAT == HALF) {
            old = master[i];
        } else if (FORMAT == SPLIT) {
            const float joined = as_float((uint32_t(half[i]) << 16) + uint32_t(int32_t(int16_t(remainder[i]))));
            old = joined == joined ? joined : from_bf16(half[i]);
        } else if (FORMAT == KAHAN) {
            old = from_bf16(half[i]) + from_bf16(remainder[i]);
        } else {
            old = from_bf16(half[i]);
        }
        if (sizeof(Grad) == 2) {
            g = from_bf16(uint16_t(grad[i]));
        } else {
            g = float(grad[i]);
        }
        if (RULE != SGD) m = first[i];
        if (RULE == ADAMW) v = second[i];
        const float value = updated<RULE>(old, g * settings.inverse, m, v, rate, settings);
        if (RULE != SGD) first[i] = m;
        if (RULE == ADAMW) second[i] = v;
        if (FORMAT == WHOLE || FORMAT == HALF) master[i] = value;
        if (FORMAT == HALF) half[i] = to_bf16(value);
        if (FORMAT == SPLIT) {
            const uint32_t bits = as_bits(value), high = uint32_t(int32_t(bits + 0x8000) >> 16);
            half[i] = uint16_t(high);
            remainder[i] = uint16_t(bits - (high << 16));
        }
        if (FORMAT == KAHAN) {
            const uint16_t rounded = to_bf16(value), rest = to_bf16(value - from_bf16(rounded));
            const bool same = as_bits(value) == as_bits(old);  // a skipped or empty update keeps both, ties included
            half[i] = same ? half[i] : rounded;
            remainder[i] = same ? remainder[i] : rest;
        }
        if (FORMAT == STOCHASTIC) half[i] = stochastic(value, uint32_t(t.offset + i), settings.key, factor);
    }
}

template <int RULE, int FORMAT, typename Grad>
void tensor(const Tensors& t, const Settings& s, int64_t begin, int64_t end) {
    if (FORMAT != STOCHASTIC) return values<RULE, FORMAT, Grad>(t, s, begin, end, 0);
    while (begin < end) {  // a factor for each block of draws
        const int64_t block = (t.offset + begin) / DRAWS_OF_BLOCK, last = (block + 1) * DRAWS_OF_BLOCK - t.offset;
        const int64_t stop = last < end ? last : end;
        values<RULE, FORMAT, Grad>(t, s, begin, stop, hash((uint32_t(block) ^ GOLDEN) + s.key) | 1);
        begin = stop;
    }
}

template <int RULE, typename Grad>
void of_format(const Tensors& t, const Settings& s, int64_t begin, int64_t end) {
    switch (t.format) {
        case WHOLE: return tensor<RULE, WHOLE, Grad>(t, s, begin, end);
        case HALF: return tensor<RULE, HALF, Grad>(t, s, begin, end);
        case SPLIT: return tensor<RULE, SPLIT, Grad>(t, s, begin, end);
        case KAHAN: return tensor<RULE, KAHAN, Grad>(t, s, begin, end);
        default: return tensor<RULE, STOCHASTIC, Grad>(t, s, begin, end);
    }
}

template <int RULE>
void of_gradient(const Tensors& t, const Settings& s, int64_t begin, int64_t end) {
    return t.bf16_grad ? of_format<RULE, uint16_t>(t, s, begin, end) : of_format<RULE, float>(t, s, begin, end);
}

}  // namespace

// Begin the step of all tensors: their rates, and one more in their counters.
extern "C" void begin(Tensors* tensors, int64_t count, const Settings* settings) {
    for (Tensors* t = tensors; t < tensors + count; ++t) {
        t->rates[0] = float(settings->lr);
        if (!t->step) continue;
        const double steps = double(*t->step) + 1;
        t->rates[1] = float(settings->lr / (1 - std::pow(settings->power1, steps)));
        t->rates[2] = float(1 / std::sqrt(1 - std::pow(settings->power2, steps)));
        *t->step += 1;
    }
}

// Update the values from `begin` to `end` of all tensors laid end to end.
extern "C" void update(const Tensors* tensors, int64_t count, const Settings* settings, int64_t begin, int64_t end) {
    for (int64_t k = 0, start = 0; k < count && start < end; start += tensors[k++].numel) {
        const Tensors& t = tensors[k];
        const int64_t from = begin > start ? begin - start : 0, to = end - start < t.numel ? end - start : t.numel;
        if (from >= to) continue;
        switch (settings->rule) {
            case ADAMW: of_gradient<ADAMW>(t, *settings, from, to); break;
            case SGD: of_gradient<SGD>(t, *settings, from, to); break;
            case MOMENTUM: of_gradient<MOMENTUM>(t, *settings, from, to); break;
            default: of_gradient<LION>(t, *settings, from, to);
        }
    }
}
