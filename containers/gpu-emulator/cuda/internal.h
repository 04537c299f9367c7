/* The emulated CUDA driver within one process.
 *
 * `cuda.mutex` protects the tables below; it is never held while sleeping. Exported functions that use the GPU call
 * enter(), in which a locked process waits, and leave().
 */
#ifndef GPU_EMULATOR_CUDA_INTERNAL_H
#define GPU_EMULATOR_CUDA_INTERNAL_H

#include "core.h"
#include "cuda_abi.h"

/* A GPU that is visible to this process, used or not. */
struct gpu {
    uint8_t uuid[16];
    char chip[16];
    unsigned minor; /* index in the node's state; changes if the process is restored on another GPU */
    uint64_t bytes;
    unsigned contexts;
};

struct CUctx_st {
    CUcontext next;
    unsigned ordinal;
    bool primary, active;
    unsigned users; /* of a primary context */
    unsigned flags;
    uint64_t id;
    uint64_t end_ns; /* end of the last kernel launched here */
    uint32_t poison_epoch;
    CUresult broken; /* a permanent error of the context */
};

struct CUstream_st {
    CUstream next;
    CUcontext context;
    unsigned flags;
    int priority;
    uint64_t id, end_ns;
};

struct allocation {
    CUdeviceptr at;
    size_t size;
    CUcontext context;
    unsigned gpu;
    void *staged;  /* contents while the process is checkpointed */
    bool managed;  /* host memory that the GPU can access */
};

struct cuda {
    pthread_mutex_t mutex;
    bool initialized, forked;
    struct emu_state *state; /* mapped while the process holds GPUs, else NULL */
    unsigned gpu_count, ordinal_count;
    struct gpu gpus[EMU_MAX_GPUS];
    unsigned ordinals[EMU_MAX_GPUS]; /* CUdevice -> gpus[] */
    CUcontext contexts;
    CUstream streams;
    struct allocation *allocations; /* by address */
    size_t allocation_count, allocation_room;
    CUdeviceptr next_address;
    uint64_t next_id;
};

extern struct cuda cuda;

/* gate.c */
CUresult enter(void);
void leave(void);
CUprocessState gate_state(void);
CUresult gate_lock(uint32_t timeout_ms);
CUresult gate_unlock(void);
/* Between the two calls only the restore thread runs: the process is locked or checkpointed. */
bool gate_is(CUprocessState state);
void gate_set(CUprocessState state);

/* context.c: enter(), and the current context, which is valid and on an available GPU. After CUDA_SUCCESS, call leave(). */
CUresult enter_context(CUcontext *context);
CUresult context_health(CUcontext context);
CUcontext current_context(void);
bool context_exists(CUcontext context);
uint64_t last_kernel_end(void);
struct gpu *gpu_of(CUdevice device);

/* stream.c */
CUresult stream_of(CUcontext context, CUstream handle, uint64_t **end_ns);
void streams_drop(CUcontext context);
void streams_settle(uint64_t now_ns);
CUresult wait_until(CUcontext context, uint64_t end_ns);

/* memory.c, cuda.mutex held */
CUresult memory_allocate(CUcontext context, size_t size, bool managed, CUdeviceptr *out);
CUresult memory_free(CUdeviceptr at);
void memory_drop(CUcontext context);
CUresult memory_window(CUcontext context, CUdeviceptr at, size_t size);
void memory_unwindow(CUdeviceptr at);
struct allocation *allocation_at(CUdeviceptr at);
bool is_device_range(CUdeviceptr at, size_t size);

/* vram.c: contents of device memory, outside of the resident memory of the process. */
int vram_open(void);
void vram_close(void);
CUresult vram_write(CUdeviceptr at, const void *from, size_t size);
CUresult vram_read(CUdeviceptr at, void *to, size_t size);
CUresult vram_fill(CUdeviceptr at, const void *pattern, size_t width, size_t count);
void vram_discard(CUdeviceptr at, size_t size);
CUresult vram_stage(struct allocation *allocation);
CUresult vram_unstage(struct allocation *allocation);
/* Names in /proc/PID/fd of the file and the layout of device memory, for a process that copies it. */
int vram_table_open(void);
void vram_table_close(void);
#define VRAM_NAME "gpu-emulator-vram"
#define VRAM_TABLE_NAME "gpu-emulator-table"
struct vram_entry {
    CUdeviceptr at;
    uint64_t size;
    uint32_t minor, pad;
};
#define VRAM_BASE 0x302000000ULL
#define VRAM_END 0x400000000000ULL

/* storage.c: device memory of another process, mapped here during its checkpoint or restore. */
#define WINDOW_BASE 0x410000000000ULL
#define WINDOW_STRIDE (1ULL << 38)
CUresult window_copy(CUdeviceptr at, void *data, size_t size, bool write);
CUresult storage_begin(pid_t pid, CUcheckpointCustomStorageInfo **out);
/* checkpoint.c */
CUresult storage_complete(pid_t pid);
CUresult storage_possible(struct emu_state *state, pid_t pid);

/* hold.c: files that a process with GPUs has open. */
void hold_devices(void);
void release_devices(void);
void forget_devices(void); /* in a child of fork() */

/* restore.c */
CUresult restore_thread_start(void);

#endif
