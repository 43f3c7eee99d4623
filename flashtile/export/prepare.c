flashtile_status flashtile_prepare(void) {
    struct gpu *gpu = NULL;
    flashtile_status status;
    int i;
    pthread_mutex_lock(&mutex);
    status = current_gpu(&gpu);
    for (i = 0; status == FLASHTILE_OK && i < KERNELS; i++)
        if (kernels[i]->arch == gpu->arch) status = load_kernel(gpu, kernels[i]);
    pthread_mutex_unlock(&mutex);
    return status;
}
