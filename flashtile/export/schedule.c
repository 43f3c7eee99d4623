/* Which tile a forward gets on Hopper and how blocks share its tiles: as flashtile's planner decides, whose comments say
   why (kernels/sm90/host/choose_forward.py, schedule.py). Times are microseconds. */

struct tiling {
    int64_t block_q, block_k;
    double key_us; /* a key tile's time */
    int resident;  /* may as many blocks as the GPU has SMs compute several tiles each? */
};

struct schedule {
    int64_t group, bytes_per_key;
    int has_left, has_right;
    int64_t left, right;
    int full_count, causal_count;
    struct tiling full[2], causal[2];
};

static const double TILE_US = @TILE_US@, BLOCK_US = @BLOCK_US@, EVEN = @EVEN@;
enum { TOGETHER_BYTES = @TOGETHER_BYTES@, MOST_PLAYED = @MOST_PLAYED@, MOST_QUEUED = @MOST_QUEUED@ };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Key tiles that the query tile from `row` on visits, under a band cut to these lengths. */
static int64_t tile_length(const struct schedule *s, const struct tiling *t, int64_t row, int64_t seqlen_q, int64_t seqlen_k) {
    const int64_t shift = seqlen_k - seqlen_q, first = row + shift, last = least(row + t->block_q, seqlen_q) - 1 + shift;
    int64_t low = 0, high = seqlen_k;
    if (s->has_left && s->left < seqlen_k - 1)
        low = least(most(first - most(s->left, -seqlen_q), 0), seqlen_k) / t->block_k * t->block_k;
    if (s->has_right && s->right < seqlen_q - 1) high = least(most(last + most(s->right, -seqlen_k) + 1, 0), seqlen_k);
    high = most(high, low);
    return most((high + t->block_k - 1) / t->block_k - low / t->block_k, 1);
}

/* Time of the busiest of `blocks` resident blocks, which take tiles to and fro, `together` heads at a time. */
static double busiest(const double *times, int64_t tiles, int64_t heads, int64_t together, double *load, int64_t blocks) {
    double end = 0.0;
    int64_t first, tile, head, place = 0, i;
    for (i = 0; i < blocks; i++) load[i] = 0.0;
    for (first = 0; first < heads; first += together) {
        for (tile = tiles - 1; tile >= 0; tile--) {
            for (head = first; head < least(first + together, heads); head++, place++) {
                const int64_t rank = place % blocks;
                load[(place / blocks) & 1 ? blocks - 1 - rank : rank] += times[tile];
            }
        }
    }
    for (i = 0; i < blocks; i++) end = load[i] > end ? load[i] : end;
    return end;
}

/* When the last tile is done if each has a block of its own, started as soon as one of `places` is free. `ends` is a heap. */
static double queued(const double *times, int64_t tiles, int64_t heads, int64_t together, double *ends, int64_t places) {
    double end = 0.0;
    int64_t first, tile, head, i;
    if (tiles * heads > MOST_QUEUED) {
        double sum = 0.0, longest = 0.0;
        for (i = 0; i < tiles; i++) {
            sum += times[i];
            longest = times[i] > longest ? times[i] : longest;
        }
        return sum * (double)heads / (double)places + longest / 2;
    }
    for (i = 0; i < places; i++) ends[i] = 0.0;
    for (first = 0; first < heads; first += together) {
        for (tile = tiles - 1; tile >= 0; tile--) {
            for (head = first; head < least(first + together, heads); head++) {
                const double value = ends[0] + times[tile];
                int64_t at = 0, next;
                while ((next = 2 * at + 1) < places) {
                    if (next + 1 < places && ends[next + 1] < ends[next]) next++;
                    if (ends[next] >= value) break;
                    ends[at] = ends[next];
                    at = next;
                }
                ends[at] = value;
            }
        }
    }
    for (i = 0; i < places; i++) end = ends[i] > end ? ends[i] : end;
    return end;
}

/* As many heads as the L2 cache has room for. */
static int64_t heads_together(int64_t heads, int64_t head_bytes) {
    if (heads * head_bytes <= 2 * (int64_t)TOGETHER_BYTES) return heads;
    return most(least(heads, TOGETHER_BYTES / head_bytes), 1);
}

/* The cheapest option, of the full tilings and then of each causal one with a block for every tile and with resident blocks,
   counted from 1, and how many heads go together in it; 0 where the host has no memory. */
static int64_t choose(const struct schedule *s, int64_t batch, int64_t heads_q, int64_t seqlen_q, int64_t seqlen_k, int64_t blocks,
                      int64_t *swizzle) {
    static const int64_t together_options[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192};
    const int causal = s->has_right && s->right < seqlen_q - 1;
    const struct tiling *tilings = causal ? s->causal : s->full;
    const int64_t heads = batch * heads_q;
    double best = -1.0, *times = NULL, *load = (double *)malloc((size_t)blocks * sizeof *load);
    int64_t choice = 0, option;
    int i;
    for (i = 0; load && i < (causal ? s->causal_count : s->full_count); i++) {
        const struct tiling *t = &tilings[i];
        const int64_t tiles = (seqlen_q + t->block_q - 1) / t->block_q;
        const int64_t together = heads_together(heads, seqlen_k * s->bytes_per_key / s->group);
        double longest = 0.0, sum = 0.0, cost;
        int64_t j;
        free(times);
        times = (double *)malloc((size_t)tiles * sizeof *times);
        if (!times) {
            choice = 0;
            break;
        }
        for (j = 0; j < tiles; j++) {
            times[j] = (double)tile_length(s, t, j * t->block_q, seqlen_q, seqlen_k) * t->key_us;
            longest = times[j] > longest ? times[j] : longest;
        }
        if (!causal) {
            cost = (double)((tiles * heads + blocks - 1) / blocks) * (longest + TILE_US);
            if (choice == 0 || cost < best) {
                best = cost;
                choice = i + 1;
                *swizzle = 0;
            }
            continue;
        }
        option = s->full_count + 1 + 2 * i;
        for (j = 0; j < tiles; j++) times[j] += BLOCK_US;
        cost = queued(times, tiles, heads, together >= 8 ? 8 : 4, load, blocks);
        if (choice == 0 || cost < best) {
            best = cost;
            choice = option;
            *swizzle = together >= 8 ? 8 : 4;
        }
        if (!t->resident || tiles * heads > MOST_PLAYED) continue;
        for (j = 0; j < tiles; j++) {
            times[j] = (double)tile_length(s, t, j * t->block_q, seqlen_q, seqlen_k) * t->key_us + TILE_US;
            sum += times[j];
        }
        for (j = 0; j < (int64_t)(sizeof together_options / sizeof *together_options); j++) {
            if (together_options[j] > together) break;
            cost = busiest(times, tiles, heads, together_options[j], load, blocks);
            if (cost < best) {
                best = cost;
                choice = option + 1;
                *swizzle = together_options[j];
            }
            if (cost < EVEN * sum * (double)heads / (double)blocks) break;
        }
    }
    free(times);
    free(load);
    return choice;
}

/* `choose`, remembered for the latest sizes. */
static flashtile_status schedule_forward(const struct schedule *s, int64_t batch, int64_t heads_q, int64_t seqlen_q, int64_t seqlen_k,
                                         int64_t blocks, int64_t *choice, int64_t *swizzle) {
    enum { REMEMBERED = 32 };
    static struct {
        const struct schedule *schedule;
        int64_t batch, heads_q, seqlen_q, seqlen_k, blocks, choice, swizzle;
    } known[REMEMBERED];
    static int next;
    int i;
    pthread_mutex_lock(&mutex);
    for (i = 0; i < REMEMBERED; i++) {
        if (known[i].schedule == s && known[i].batch == batch && known[i].heads_q == heads_q && known[i].seqlen_q == seqlen_q &&
            known[i].seqlen_k == seqlen_k && known[i].blocks == blocks)
            break;
    }
    if (i == REMEMBERED) {
        *choice = choose(s, batch, heads_q, seqlen_q, seqlen_k, blocks, swizzle);
        i = next;
        if (*choice > 0) {
            next = (next + 1) % REMEMBERED;
            known[i].schedule = s;
            known[i].batch = batch;
            known[i].heads_q = heads_q;
            known[i].seqlen_q = seqlen_q;
            known[i].seqlen_k = seqlen_k;
            known[i].blocks = blocks;
            known[i].choice = *choice;
            known[i].swizzle = *swizzle;
        }
    } else {
        *choice = known[i].choice;
        *swizzle = known[i].swizzle;
    }
    pthread_mutex_unlock(&mutex);
    return *choice > 0 ? FLASHTILE_OK : fail(FLASHTILE_OUT_OF_MEMORY, "host memory for %lld tiles is missing", (long long)seqlen_q / 64);
}
