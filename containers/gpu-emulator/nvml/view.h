/* A GPU during one NVML call. The state is mapped only during calls, so that nothing of the driver is in the image of a
 * program that uses only NVML. */
#ifndef GPU_EMULATOR_NVML_VIEW_H
#define GPU_EMULATOR_NVML_VIEW_H

#include "core.h"
#include "nvml_abi.h"

struct view {
    struct emu_state *state;
    struct emu_gpu *gpu;
    unsigned minor; /* index of the GPU in the node's state */
};

/* After NVML_SUCCESS the state is locked, resources of dead processes are freed, and the caller must call view_close(). */
nvmlReturn_t view_node(struct view *view);
nvmlReturn_t view_gpu(struct view *view, nvmlDevice_t device);
void view_close(struct view *view);

unsigned visible_count(void);
nvmlDevice_t visible_at(unsigned index);
nvmlReturn_t visible_minor(nvmlDevice_t device, unsigned *minor);
nvmlReturn_t visible_index(nvmlDevice_t device, unsigned *index);
nvmlDevice_t visible_by_minor(unsigned minor);

/* Defines an exported function that returns one value of a GPU; `expression` may use `view` and `now_ns`. */
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

/* Copies a string with its terminator; a buffer that is too small is an error, as in NVML. */
nvmlReturn_t copy_text(char *out, unsigned length, const char *text);

#endif
