/* Attention of a few query rows over many cached tokens: every key and value is read once from memory for all rows of
 * its head, which is what bounds the speed when rows are few. Compiled by attend.py with
 *   -DHEAD_DIM=<n>             size of a head, a multiple of 8
 *   -DBFLOAT16                 keys and values are bfloat16; sums are float32 in any case
 * Rows belonging to one key/value head come together. Ranges of tokens are given in groups; each (head, group) is one
 * task, with its own output and log-sum-exp for the caller to merge.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64 /* tokens whose scores are held at once */
#define MAX_ROWS 16

#ifdef BFLOAT16
typedef uint16_t element;
static void widen(const element *restrict in, float *restrict out, long count)
{
    for (long i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, 4);
    }
}
#else
typedef float element;
#endif

static void block(const float *restrict q, const element *restrict keys, const element *restrict values, long count,
                  long rows, float *restrict out, float *restrict top, float *restrict sum)
{
    float scores[MAX_ROWS][BLOCK];
#ifdef BFLOAT16
    float wide[BLOCK * HEAD_DIM];
    widen(keys, wide, count * HEAD_DIM);
    const float *k = wide;
#else
    const float *k = keys;
#endif
    for (long t = 0; t < count; t++)
        for (long r = 0; r < rows; r++) {
            float dot = 0;
            for (int d = 0; d < HEAD_DIM; d++)
                dot += q[r * HEAD_DIM + d] * k[t * HEAD_DIM + d];
            scores[r][t] = dot;
        }
#ifdef BFLOAT16
    widen(values, wide, count * HEAD_DIM);
    const float *v = wide;
#else
    const float *v = values;
#endif
    for (long r = 0; r < rows; r++) {
        float highest = top[r], added = 0, gathered[HEAD_DIM];
        for (long t = 0; t < count; t++)
            highest = scores[r][t] > highest ? scores[r][t] : highest;
        float shrink = expf(top[r] - highest);
        for (long t = 0; t < count; t++)
            scores[r][t] = expf(scores[r][t] - highest);
        for (long t = 0; t < count; t++)
            added += scores[r][t];
        for (int d = 0; d < HEAD_DIM; d++)
            gathered[d] = out[r * HEAD_DIM + d] * shrink;
        for (long t = 0; t < count; t++)
            for (int d = 0; d < HEAD_DIM; d++)
                gathered[d] += scores[r][t] * v[t * HEAD_DIM + d];
        for (int d = 0; d < HEAD_DIM; d++)
            out[r * HEAD_DIM + d] = gathered[d];
        sum[r] = sum[r] * shrink + added;
        top[r] = highest;
    }
}

/* q (heads, rows, HEAD_DIM), scaled; keys and values (heads, ..., HEAD_DIM) with `stride` elements from head to head;
 * range i covers tokens starts[i] to ends[i]; group g holds ranges groups[g] to groups[g + 1].
 * out (heads, groups, rows, HEAD_DIM) and lse (heads, groups, rows) are filled. */
void attend(const float *q, const element *keys, const element *values, long stride, long heads, long rows,
            const int64_t *starts, const int64_t *ends, const int64_t *groups, long count, float *out, float *lse)
{
#pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < heads * count; task++) {
        long head = task / count, group = task % count;
        float top[MAX_ROWS], sum[MAX_ROWS], *mine = out + task * rows * HEAD_DIM;
        memset(mine, 0, rows * HEAD_DIM * sizeof *mine);
        for (long r = 0; r < rows; r++)
            top[r] = -1e30f, sum[r] = 0;
        for (int64_t range = groups[group]; range < groups[group + 1]; range++)
            for (int64_t t = starts[range]; t < ends[range]; t += BLOCK) {
                long size = ends[range] - t < BLOCK ? ends[range] - t : BLOCK;
                long at = head * stride + t * HEAD_DIM;
                block(q + head * rows * HEAD_DIM, keys + at, values + at, size, rows, mine, top, sum);
            }
        for (long r = 0; r < rows; r++) {
            float share = sum[r] > 0 ? 1 / sum[r] : 0; /* a group may hold no token */
            for (int d = 0; d < HEAD_DIM; d++)
                mine[r * HEAD_DIM + d] *= share;
            lse[task * rows + r] = sum[r] > 0 ? top[r] + logf(sum[r]) : top[r];
        }
    }
}

/* best (heads, ranges, rows): the highest product of each row of q with a key of each range; -1e30 for an empty one. */
void maxsim(const float *q, const element *keys, long stride, long heads, long rows, const int64_t *starts,
            const int64_t *ends, long ranges, float *best)
{
#pragma omp parallel for schedule(dynamic, 16) collapse(2)
    for (long head = 0; head < heads; head++)
        for (long range = 0; range < ranges; range++) {
            const float *mine = q + head * rows * HEAD_DIM;
            float *found = best + (head * ranges + range) * rows;
            for (long r = 0; r < rows; r++)
                found[r] = -1e30f;
            for (int64_t t = starts[range]; t < ends[range]; t++) {
                const element *key = keys + head * stride + t * HEAD_DIM;
#ifdef BFLOAT16
                float k[HEAD_DIM];
                widen(key, k, HEAD_DIM);
#else
                const float *k = key;
#endif
                for (long r = 0; r < rows; r++) {
                    float dot = 0;
                    for (int d = 0; d < HEAD_DIM; d++)
                        dot += mine[r * HEAD_DIM + d] * k[d];
                    found[r] = dot > found[r] ? dot : found[r];
                }
            }
        }
}
