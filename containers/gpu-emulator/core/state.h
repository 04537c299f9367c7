/* The state that all processes of a node share: a file that the users of the emulated driver map.
 *
 * It has a fixed size and no pointers: a process may map it at any address, and the file has the same size on every node,
 * so that a process that maps it can be restored on another node. It records only the resources of each process; sums are
 * computed on request, so that a process that dies during an update leaves nothing to repair.
 */
#ifndef GPU_EMULATOR_STATE_H
#define GPU_EMULATOR_STATE_H

#include <pthread.h>
#include <stdint.h>

#define EMU_MAGIC 0x31554d4555504741ULL
#define EMU_LAYOUT 1
#define EMU_MAX_GPUS 16
#define EMU_MAX_PROCS 256
#define EMU_MAX_REQUESTS 64
#define EMU_INTERVALS 2048
#define EMU_EVENTS 256
#define EMU_NAME 96
#define EMU_DEFAULT_STATE "/run/gpu-emulator/state"
#define EMU_MIB (1024ULL * 1024ULL)
/* Device memory is allocated to processes in blocks of this size. */
#define EMU_BLOCK (2ULL * EMU_MIB)

/* GPU use of a process in an interval. `busy_ns` is less than its length if short kernels with gaps were merged. */
struct emu_interval {
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t busy_ns;
    uint64_t owner; /* emu_proc.serial */
};

/* A GPU runs one kernel at a time; this records when. */
struct emu_timeline {
    uint64_t busy_until_ns;
    uint64_t total_busy_ns;
    uint64_t count; /* intervals ever written; the last EMU_INTERVALS are kept */
    struct emu_interval ring[EMU_INTERVALS];
};

struct emu_gpu {
    char name[EMU_NAME];
    char chip[16];
    uint8_t uuid[16];
    char serial[32];
    uint32_t pci_domain, pci_bus, pci_device, pci_device_id, pci_subsystem_id;
    uint64_t total_bytes, reserved_bytes;
    int32_t cc_major, cc_minor, multiprocessors;
    uint32_t power_idle_mw, power_limit_mw;
    uint32_t sm_clock_mhz, mem_clock_mhz, bus_width, architecture;
    uint32_t mig_capable;
    uint32_t persistence;
    uint32_t lost, util_unsupported;
    uint32_t poison_epoch; /* incremented by an error that kills the contexts on this GPU */
    int32_t poison_error;  /* the CUresult that they return then */
    struct emu_timeline timeline;
};

struct emu_proc_gpu {
    uint64_t bytes;
    uint32_t contexts;
    uint32_t pad;
};

/* A process that has initialized CUDA. It holds the record lock of its slot while it is alive: see slots.c. */
struct emu_proc {
    uint32_t used;
    uint32_t cuda_state; /* CUprocessState */
    uint64_t serial;
    int32_t ns_pid; /* its PID in its own PID namespace: for display, not for identification */
    uint32_t pad;
    char comm[32];
    struct emu_proc_gpu gpu[EMU_MAX_GPUS];
};

/* OUT and IN: with custom storage; the caller copies the memory before COMPLETE: see cuda/storage.c. */
enum emu_op { EMU_OP_LOCK = 1, EMU_OP_CHECKPOINT, EMU_OP_RESTORE, EMU_OP_UNLOCK, EMU_OP_OUT, EMU_OP_IN, EMU_OP_COMPLETE };
enum emu_request_status { EMU_POSTED = 0, EMU_TAKEN = 1, EMU_DONE = 2 };

struct emu_pair {
    uint8_t old_uuid[16];
    uint8_t new_uuid[16];
};

/* A request from one process to the restore thread of another: see mailbox.c. */
struct emu_request {
    uint32_t used;
    uint32_t status; /* futex */
    uint64_t nonce;
    uint32_t op;
    uint32_t timeout_ms;
    uint32_t pair_count;
    int32_t result;
    struct emu_pair pairs[EMU_MAX_GPUS];
};

struct emu_event {
    uint64_t number;
    uint64_t type;
    uint64_t data;
    uint32_t gpu;
    uint32_t pad;
};

/* A fault of the next operations of a kind. */
enum emu_fault_kind { EMU_FAULT_LOCK_TIMEOUT = 0, EMU_FAULT_CHECKPOINT, EMU_FAULT_RESTORE, EMU_FAULT_KINDS };

struct emu_fault {
    uint32_t remaining; /* number of operations left to fail; UINT32_MAX: all */
    int32_t pid;        /* only this process, by its PID in its own namespace; 0: any */
    int32_t error;      /* CUresult */
    uint32_t fatal;     /* the process ends in CU_PROCESS_STATE_FAILED */
};

struct emu_state {
    uint64_t magic;
    uint32_t layout;
    uint32_t size;
    pthread_mutex_t mutex; /* robust, shared between processes */
    uint32_t gpu_count;
    int32_t cuda_version; /* 13000: 13.0 */
    char driver_version[32];
    uint64_t created_ns;
    uint64_t sample_period_ns;
    uint64_t context_bytes; /* memory of a context on its GPU */
    uint64_t next_serial, next_nonce;
    uint32_t nvml_lost; /* every NVML call fails, as during a reload of the driver */
    uint32_t event_futex;
    uint64_t event_count;
    struct emu_fault faults[EMU_FAULT_KINDS];
    struct emu_event events[EMU_EVENTS];
    struct emu_request requests[EMU_MAX_REQUESTS];
    struct emu_proc procs[EMU_MAX_PROCS];
    struct emu_gpu gpus[EMU_MAX_GPUS];
};

#endif
