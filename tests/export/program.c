/* Calls exported C from several threads, rightly and wrongly. See test_emitted.py. */
#include "flashtile_attention.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, CALLS = 5 };

static void *at(int i) { return (void *)(uintptr_t)((uint64_t)i << 20); }

static void *work(void *place) {
    flashtile_small_forward_tensors forward = {at(1), at(2), at(3), at(4), at(5)};
    flashtile_small_backward_tensors backward = {at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9)};
    int *wrong = (int *)place, i;
    size_t bytes = 0;
    for (i = 0; i < CALLS; i++) {
        *wrong += flashtile_small_forward(&forward, 2, 100 + i, 130, 3, NULL, 0, NULL) != FLASHTILE_OK;
        *wrong += flashtile_small_backward_scratch(2, 100 + i, 130, 3, &bytes) != FLASHTILE_OK;
        *wrong += flashtile_small_backward(&backward, 2, 100 + i, 130, 3, at(10), bytes, NULL) != FLASHTILE_OK;
        forward.k = NULL;
        *wrong += flashtile_small_forward(&forward, 2, 100 + i, 130, 3, NULL, 0, NULL) != FLASHTILE_INVALID_ARGUMENT;
        forward.k = at(2);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    int wrong[THREADS] = {0}, total = 0, i;
    for (i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, &wrong[i])) return 2;
    for (i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        total += wrong[i];
    }
    if (flashtile_prepare() != FLASHTILE_OK) total++;
    printf("%d wrong, last error: %s\n", total, flashtile_last_error());
    return total != 0;
}
