/* @quotient_up */
static int64_t quotient_up(int64_t a, int64_t b) { return a / b + (a % b > 0); }

/* @quotient_down */
static int64_t quotient_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* @zero */
/* Fill `rows` rows of `words` 32-bit words, `pitch` words apart, with 0. */
static flashtile_status zero(uint64_t at, int64_t rows, int64_t words, int64_t pitch, void *stream) {
    const int error = driver.set_words(at, (size_t)pitch * 4, 0, (size_t)words, (size_t)rows, stream);
    return error == 0 ? FLASHTILE_OK : driver_error(error, "the filling", "a buffer");
}

/* @describe */
/* A tensor of four axes as Hopper's bulk copy engine sees it. Sizes and strides, in elements, go outermost first; an axis of
   one element is never walked, so that any stride is right, and this one the engine accepts. */
static flashtile_status describe(struct tensor_map *map, uint64_t at, int type, int element_bytes, int swizzle,
                                 const int64_t *sizes, int64_t *strides, const uint32_t *block) {
    uint64_t shape[4], pitches[3];
    uint32_t box[4], steps[4] = {1, 1, 1, 1};
    int error, i;
    if (!driver.encode_tiled) return fail(FLASHTILE_NO_DRIVER, "the CUDA driver is older than 12.0 and knows no tensor maps");
    for (i = 0; i < 4; i++) {
        if (i < 3 && sizes[i] == 1) strides[i] = 16;
        shape[3 - i] = (uint64_t)sizes[i];
        box[3 - i] = block[i];
        if (i < 3) pitches[2 - i] = (uint64_t)(strides[i] * element_bytes);
    }
    error = driver.encode_tiled(map, type, 4, (void *)(uintptr_t)at, shape, pitches, box, steps, 0, swizzle, 2, 0);
    return error == 0 ? FLASHTILE_OK : driver_error(error, "encoding", "a tensor map");
}
