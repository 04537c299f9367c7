/* Modules and kernels.
 *
 * PTX is not executed. Only the names of the entry functions of a module are read; two of them have an effect:
 *
 *   busy_ns(.param .u64 ns)                                        keeps the GPU busy for this time
 *   add_u32(.param .u64 at, .u64 count, .u32 value, .u64 ns)       the same, and adds `value` to `count` words
 *
 * Other kernels can be loaded and looked up; their launch returns CUDA_ERROR_NOT_SUPPORTED.
 */
#include "internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME 128
#define ENTRIES 64
#define LONGEST_NS 3600000000000ULL

enum kind { UNKNOWN_KERNEL, BUSY_NS, ADD_U32 };

struct CUfunc_st {
    char name[NAME];
    enum kind kind;
    CUmodule module;
};

struct CUmod_st {
    CUmodule next;
    bool loaded;
    unsigned count;
    struct CUfunc_st functions[ENTRIES];
};

static CUmodule modules;

static const char *skip_blank(const char *text)
{
    while (*text != '\0') {
        if (isspace((unsigned char)*text))
            text++;
        else if (strncmp(text, "//", 2) == 0)
            text += strcspn(text, "\n");
        else
            break;
    }
    return text;
}

static enum kind kind_of(const char *name)
{
    return strcmp(name, "busy_ns") == 0 ? BUSY_NS : strcmp(name, "add_u32") == 0 ? ADD_U32 : UNKNOWN_KERNEL;
}

static bool is_name(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

static CUresult parse(const char *text, CUmodule module)
{
    text = skip_blank(text);
    if (*text != '.')
        return CUDA_ERROR_INVALID_PTX;
    while ((text = strstr(text, ".entry")) != NULL) {
        struct CUfunc_st *function = &module->functions[module->count];
        size_t length = 0;

        text = skip_blank(text + strlen(".entry"));
        while (is_name(text[length]))
            length++;
        if (length == 0 || length >= NAME || module->count == ENTRIES)
            return CUDA_ERROR_INVALID_PTX;
        memcpy(function->name, text, length);
        function->name[length] = '\0';
        function->kind = kind_of(function->name);
        function->module = module;
        module->count++;
    }
    return CUDA_SUCCESS;
}

static bool is_binary(const unsigned char *image)
{
    static const unsigned char elf[] = {0x7f, 'E', 'L', 'F'}, fatbin[] = {0x50, 0xed, 0x55, 0xba}, wrapper[] = {0xb1, 0x43, 0x62, 0x46};

    return memcmp(image, elf, 4) == 0 || memcmp(image, fatbin, 4) == 0 || memcmp(image, wrapper, 4) == 0;
}

static CUresult load(CUmodule *out, const void *image)
{
    CUcontext context;
    CUmodule module;
    CUresult rc = out == NULL || image == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    module = calloc(1, sizeof(*module));
    if (module == NULL)
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    else if (is_binary(image))
        rc = CUDA_ERROR_NO_BINARY_FOR_GPU;
    else
        rc = parse(image, module);
    if (rc == CUDA_SUCCESS) {
        pthread_mutex_lock(&cuda.mutex);
        module->next = modules;
        module->loaded = true;
        modules = module;
        *out = module;
        pthread_mutex_unlock(&cuda.mutex);
    } else {
        free(module);
    }
    leave();
    return rc;
}

CUDA_EXPORT(cuModuleLoadData, CUmodule *out, const void *image)
{
    return load(out, image);
}

CUDA_EXPORT(cuModuleLoadDataEx, CUmodule *out, const void *image, unsigned count, void *options, void *values)
{
    (void)count, (void)options, (void)values;
    return load(out, image);
}

CUDA_EXPORT(cuModuleLoad, CUmodule *out, const char *path)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file;
    CUresult rc;

    if (path == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    file = fopen(path, "re");
    if (file == NULL)
        return CUDA_ERROR_FILE_NOT_FOUND;
    rc = getdelim(&text, &size, '\0', file) > 0 ? load(out, text) : CUDA_ERROR_INVALID_IMAGE;
    fclose(file);
    free(text);
    return rc;
}

static bool is_loaded(CUmodule module)
{
    for (CUmodule at = modules; at != NULL; at = at->next)
        if (at == module)
            return at->loaded;
    return false;
}

CUDA_EXPORT(cuModuleUnload, CUmodule module)
{
    CUcontext context;
    CUresult rc = enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    if (is_loaded(module))
        module->loaded = false;
    else
        rc = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuModuleGetFunction, CUfunction *out, CUmodule module, const char *name)
{
    CUcontext context;
    CUresult rc = out == NULL || name == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    rc = is_loaded(module) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
    for (unsigned at = 0; rc == CUDA_ERROR_NOT_FOUND && at < module->count; at++) {
        if (strcmp(module->functions[at].name, name) == 0) {
            *out = &module->functions[at];
            rc = CUDA_SUCCESS;
        }
    }
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

struct arguments {
    uint64_t at, count, ns;
    uint32_t value;
};

static void copy_value(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

static CUresult read_parameters(enum kind kind, void **parameters, struct arguments *out)
{
    if (kind == BUSY_NS) {
        copy_value(&out->ns, parameters[0], 8);
    } else {
        copy_value(&out->at, parameters[0], 8);
        copy_value(&out->count, parameters[1], 8);
        copy_value(&out->value, parameters[2], 4);
        copy_value(&out->ns, parameters[3], 8);
    }
    return CUDA_SUCCESS;
}

/* The arguments in one buffer, each aligned to its size. */
static CUresult read_buffer(enum kind kind, void **extra, struct arguments *out)
{
    static const size_t offsets[] = {0, 8, 16, 24};
    const char *buffer = NULL;
    void *parameters[4];
    size_t size = 0;

    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *(size_t *)extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (buffer == NULL || size < (kind == BUSY_NS ? 8U : 32U))
        return CUDA_ERROR_INVALID_VALUE;
    for (int at = 0; at < 4; at++)
        parameters[at] = (void *)(uintptr_t)(buffer + offsets[at]);
    return read_parameters(kind, parameters, out);
}

static CUresult add(const struct arguments *arguments)
{
    uint32_t words[4096];
    CUdeviceptr at = arguments->at;
    CUresult rc = CUDA_SUCCESS;

    if (arguments->count > VRAM_END || !is_device_range(at, arguments->count * 4))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (uint64_t left = arguments->count; left > 0 && rc == CUDA_SUCCESS;) {
        size_t now = left < 4096 ? (size_t)left : 4096;

        rc = vram_read(at, words, now * 4);
        for (size_t word = 0; word < now; word++)
            words[word] += arguments->value;
        if (rc == CUDA_SUCCESS)
            rc = vram_write(at, words, now * 4);
        at += now * 4;
        left -= now;
    }
    return rc;
}

static void run(CUcontext context, uint64_t *tail, uint64_t ns)
{
    unsigned minor = gpu_of((CUdevice)context->ordinal)->minor;
    uint64_t end_ns;

    emu_lock(cuda.state);
    end_ns = emu_launch(&cuda.state->gpus[minor], cuda.state->procs[emu_slot_own()].serial, *tail, ns, emu_now_ns());
    emu_unlock(cuda.state);
    *tail = end_ns;
    if (end_ns > context->end_ns)
        context->end_ns = end_ns;
}

static CUresult launch(CUfunction function, CUstream stream, void **parameters, void **extra)
{
    struct arguments arguments = {0};
    CUcontext context;
    uint64_t *tail;
    CUresult rc = function == NULL ? CUDA_ERROR_INVALID_HANDLE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    rc = is_loaded(function->module) ? stream_of(context, stream, &tail) : CUDA_ERROR_INVALID_HANDLE;
    if (rc == CUDA_SUCCESS && function->kind == UNKNOWN_KERNEL)
        rc = CUDA_ERROR_NOT_SUPPORTED;
    else if (rc == CUDA_SUCCESS && parameters != NULL)
        rc = read_parameters(function->kind, parameters, &arguments);
    else if (rc == CUDA_SUCCESS)
        rc = extra == NULL ? CUDA_ERROR_INVALID_VALUE : read_buffer(function->kind, extra, &arguments);
    if (rc == CUDA_SUCCESS && arguments.ns > LONGEST_NS)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS && function->kind == ADD_U32)
        rc = context->broken = add(&arguments);
    if (rc == CUDA_SUCCESS)
        run(context, tail, arguments.ns);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuLaunchKernel, CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra)
{
    (void)shared;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || block_y == 0 || block_z == 0 ||
        (uint64_t)block_x * block_y * block_z > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, stream, parameters, extra);
}

CUDA_EXPORT(cuLaunchKernelEx, const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    if (config == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                          config->blockDimZ, config->sharedMemBytes, config->hStream, parameters, extra);
}
