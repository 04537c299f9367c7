/* One NVML call's view of a GPU. The state is mapped only while a call runs, so that a program that uses NVML alone carries
 * nothing of the driver into the image of a checkpoint. */
#ifndef GPU_EMULATOR_NVML_VIEW_H
#define GPU_EMULATOR_NVML_VIEW_H

#include "core.h"
#include "nvml_abi.h"

struct view {
    struct emu_state *state;
    struct emu_gpu *gpu;
    unsigned minor; /* of the GPU in the node's state */
};

/* With NVML_SUCCESS the state is locked, what dead processes held is freed, and view_close() must follow. */
nvmlReturn_t view_node(struct view *view);
nvmlReturn_t view_gpu(struct view *view, nvmlDevice_t device);
void view_close(struct view *view);

unsigned visible_count(void);
nvmlDevice_t visible_at(unsigned index);
nvmlReturn_t visible_minor(nvmlDevice_t device, unsigned *minor);
nvmlReturn_t visible_index(nvmlDevice_t device, unsigned *index);
nvmlDevice_t visible_by_minor(unsigned minor);

/* An exported function that answers one value of a GPU; `expression` may use `view` and `now_ns`. */
#define NVML_GPU_VALUE(name, type, expression)                                                                                 \
    NVML_EXPORT(name, nvmlDevice_t device, type *out)                                                                          \
    {                                                                                                                          \
        struct view view;                                                                                                      \
        uint64_t now_ns = emu_now_ns();                                                                                        \
        nvmlReturn_t rc = out == NULL ? NVML_ERROR_INVALID_ARGUMENT : view_gpu(&view, device);                                 \
                                                                                                                               \
        (void)now_ns;                                                                                                          \
        if (rc != NVML_SUCCESS)                                                                                                \
            return rc;                                                                                                         \
        *out = (type)(expression);                                                                                             \
        view_close(&view);                                                                                                     \
        return NVML_SUCCESS;                                                                                                   \
    }

/* A copy with its end; too small a buffer is an error, as in NVML. */
nvmlReturn_t copy_text(char *out, unsigned length, const char *text);

#endif
