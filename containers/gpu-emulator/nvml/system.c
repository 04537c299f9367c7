#include "view.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

NVML_API const char *nvmlErrorString(nvmlReturn_t result);
NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
        "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires reset", "The operating system has blocked the request", "RM has detected an NVML/RM version mismatch.",
        "In use by another client", "Insufficient Memory", "No data", "ECC is not supported on vGPU", "Insufficient Resources",
        "Requested frequency is not supported", "Argument version mismatch", "Deprecated", "Not Ready", "GPU Not Found",
        "Invalid State",
    };

    if ((unsigned)result < sizeof(texts) / sizeof(texts[0]))
        return texts[result];
    return "Unknown Error";
}

NVML_EXPORT(nvmlSystemGetDriverVersion, char *version, unsigned length)
{
    struct view view;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    rc = copy_text(version, length, view.state->driver_version);
    view_close(&view);
    return rc;
}

/* NVML's version is the major version of CUDA, followed by the driver version. */
NVML_EXPORT(nvmlSystemGetNVMLVersion, char *version, unsigned length)
{
    struct view view;
    char text[64];
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    snprintf(text, sizeof(text), "%d.%s", view.state->cuda_version / 1000, view.state->driver_version);
    view_close(&view);
    return copy_text(version, length, text);
}

NVML_EXPORT(nvmlSystemGetCudaDriverVersion, int *version)
{
    struct view view;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    if (version == NULL)
        rc = NVML_ERROR_INVALID_ARGUMENT;
    else
        *version = view.state->cuda_version;
    view_close(&view);
    return rc;
}

NVML_EXPORT(nvmlSystemGetCudaDriverVersion_v2, int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

NVML_EXPORT(nvmlSystemGetProcessName, unsigned pid, char *name, unsigned length)
{
    struct view view;
    char path[64], text[1024];
    size_t got;
    FILE *file;
    nvmlReturn_t rc = view_node(&view);

    if (rc != NVML_SUCCESS)
        return rc;
    view_close(&view);
    if (name == NULL || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    file = fopen(path, "re");
    if (file == NULL)
        return NVML_ERROR_NOT_FOUND;
    got = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[got] = '\0';
    snprintf(name, length, "%s", text);
    return NVML_SUCCESS;
}
