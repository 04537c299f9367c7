/* The shared core of libcuda, libnvidia-ml and gpu-emulatorctl. Times are nanoseconds of CLOCK_REALTIME, the only clock
 * that all processes of a node share even if one of them was restored into another time namespace. */
#ifndef GPU_EMULATOR_CORE_H
#define GPU_EMULATOR_CORE_H

#include "state.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define EMU_API __attribute__((visibility("default")))

/* clock.c */
EMU_API uint64_t emu_now_ns(void);
EMU_API void emu_sleep_until(uint64_t deadline_ns);
/* Waits while *word is `value`, until the deadline (0: none). False: the deadline has passed. */
EMU_API bool emu_futex_wait(uint32_t *word, uint32_t value, uint64_t deadline_ns);
EMU_API void emu_futex_wake(uint32_t *word);

/* attach.c: the mapping, with a reference count; NULL with errno if there is no state or its layout differs. */
EMU_API const char *emu_state_path(void);
EMU_API struct emu_state *emu_attach(void);
EMU_API void emu_detach(void);
EMU_API void emu_lock(struct emu_state *state);
EMU_API void emu_unlock(struct emu_state *state);
/* Maps a file that is not this process's own state (gpu-emulatorctl, tests). */
EMU_API struct emu_state *emu_map_file(const char *path);
EMU_API void emu_unmap(struct emu_state *state);

/* locks.c: record locks on the lock file beside the state. The kernel releases them when the process ends. */
EMU_API int emu_locks_get(void);
EMU_API void emu_locks_put(void);
EMU_API bool emu_locks_take(off_t offset);
EMU_API void emu_locks_drop(off_t offset);
/* The holder's PID in this process's PID namespace; 0: it is not visible here; -1: the lock is free. */
EMU_API pid_t emu_locks_holder(off_t offset);

/* slots.c: the state's mutex must be held, unless stated otherwise. */
EMU_API int emu_slot_open(struct emu_state *state);
EMU_API void emu_slot_close(struct emu_state *state);
EMU_API int emu_slot_own(void);
EMU_API pid_t emu_slot_pid(struct emu_state *state, int slot);
EMU_API int emu_slot_of_pid(struct emu_state *state, pid_t pid);
EMU_API void emu_sweep(struct emu_state *state);
EMU_API uint64_t emu_proc_bytes(const struct emu_state *state, const struct emu_proc *proc, unsigned gpu);
EMU_API uint64_t emu_used_bytes(const struct emu_state *state, unsigned gpu);
EMU_API uint64_t emu_free_bytes(const struct emu_state *state, unsigned gpu);

/* timeline.c */
#define EMU_ANYONE 0
EMU_API uint64_t emu_launch(struct emu_gpu *gpu, uint64_t owner, uint64_t earliest_ns, uint64_t duration_ns, uint64_t now_ns);
EMU_API uint64_t emu_busy_ns(const struct emu_gpu *gpu, uint64_t owner, uint64_t from_ns, uint64_t to_ns);
EMU_API void emu_cancel(struct emu_gpu *gpu, uint64_t owner, uint64_t now_ns);
EMU_API unsigned emu_utilization(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns);
EMU_API unsigned emu_power_mw(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns);
EMU_API uint64_t emu_energy_mj(const struct emu_state *state, const struct emu_gpu *gpu, uint64_t now_ns);

/* devices.c: the devices of the node that are visible to this process, and the format of UUIDs. */
EMU_API unsigned emu_visible(const struct emu_state *state, unsigned out[EMU_MAX_GPUS]);
EMU_API int emu_find_uuid(const struct emu_state *state, const uint8_t uuid[16]);
EMU_API void emu_uuid_text(const uint8_t uuid[16], char out[41]);
EMU_API bool emu_uuid_parse(const char *text, uint8_t uuid[16]);
EMU_API void emu_bus_id(const struct emu_gpu *gpu, char out[32]);

/* events.c */
EMU_API void emu_event_post(struct emu_state *state, unsigned gpu, uint64_t type, uint64_t data);

/* faults.c: true if the fault applies to this operation; the mutex must be held. */
EMU_API bool emu_fault_hit(struct emu_state *state, enum emu_fault_kind kind, struct emu_fault *out);

/* mailbox.c */
#define EMU_RESTORE_THREAD "cuda-restore"
EMU_API int emu_restore_signal(void);
/* The thread of `pid` that serves requests, as its ID in this PID namespace; -1: there is none. */
EMU_API pid_t emu_restore_thread(pid_t pid);
EMU_API bool emu_alive(pid_t pid);
/* Waits while `pid` is stopped or frozen by a tracer; false: it still was after the timeout of a request. */
EMU_API bool emu_runs(pid_t pid);
struct emu_order {
    enum emu_op op;
    uint32_t timeout_ms, pair_count;
    struct emu_pair pairs[EMU_MAX_GPUS];
};
enum emu_post { EMU_POST_OK = 0, EMU_POST_GONE, EMU_POST_DENIED, EMU_POST_FULL, EMU_POST_LOST };
EMU_API enum emu_post emu_post(struct emu_state *state, pid_t pid, pid_t tid, const struct emu_order *order, int *result);
EMU_API struct emu_request *emu_take(struct emu_state *state, uint64_t ticket, struct emu_order *out);
EMU_API void emu_done(struct emu_state *state, struct emu_request *request, uint64_t ticket, int result);

/* create.c and models.c: creation of a state file. */
struct emu_model {
    const char *key, *name, *chip;
    uint32_t device_id, subsystem_id;
    uint32_t total_mib, reserved_mib;
    int cc_major, cc_minor, multiprocessors;
    uint32_t power_idle_w, power_limit_w, sm_clock_mhz, mem_clock_mhz, bus_width, architecture, mig_capable;
};
EMU_API const struct emu_model *emu_model_find(const char *key);
EMU_API const struct emu_model *emu_model_at(size_t index);
struct emu_create {
    const char *path, *seed, *driver_version;
    int cuda_version;
    unsigned gpu_count;
    const struct emu_model *models[EMU_MAX_GPUS];
    uint64_t memory_mib, context_mib, sample_period_ms; /* memory_mib 0: that of the model */
    bool persistence;
};
/* Returns 0 or an errno. The file is replaced atomically. */
EMU_API int emu_create(const struct emu_create *config);

#endif
