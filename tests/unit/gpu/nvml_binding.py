"""A binding of NVML in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml

MIB = 2**20


class Binding:
    """The functions of pynvml that the driver uses; functions that are not given are not supported."""

    def __init__(self, gpus=1, **answers):
        self.gpus, self.answers = gpus, answers
        self.freed = self.shut = 0
        self.counter = 0

    def __getattr__(self, name):
        if name in self.answers:
            answer = self.answers[name]

            def give(*arguments):
                value = answer(*arguments) if callable(answer) else answer
                if isinstance(value, pynvml.NVMLError):
                    raise value
                return value

            return give
        if name.startswith("nvml") and name[4].isupper():

            def refuse(*arguments):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

            return refuse
        return getattr(pynvml, name)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.shut += 1

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"gpu{index}"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"


class Gpm(Binding):
    """Activity counters that record where they were sampled."""

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self):
        self.counter += 1
        return SimpleNamespace(number=self.counter)

    def nvmlGpmSampleGet(self, handle, sample):
        sample.taken = f"{handle}"

    def nvmlGpmMigSampleGet(self, handle, instance, sample):
        sample.taken = f"{handle}/{instance}"

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(8)])

    def nvmlGpmMetricsGet(self, request):
        assert request.sample1.taken == request.sample2.taken
        assert request.sample1 is not request.sample2
        values = {1: (0, 98.0), 2: (0, 100.4), 5: (0, float("nan")), 10: (3, 55.0)}
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn, metric.value = values[metric.metricId]
        self.last = request.sample1.taken

    def nvmlGpmSampleFree(self, sample):
        self.freed += 1


def refusal(code):
    return pynvml.NVMLError(code)
