"""The reference scheduler, a real model below it, and what it takes to replay traces without one.

`Engine` is the scheduler. `torch_model.TorchModel` runs a transformers model through a `TorchStore` (torch
is imported with it, not before). `ClockModel` stands in for a model and only takes time. `open_trace`,
`servegen` and `workload` give requests; `tenants` says who sends them; `replay` puts all of it together and
measures.
"""

from .clock import Clock, ClockModel, StepTime, VirtualClock, WallClock
from .request import Blocks, Cause, Literal, Prompt, Request, Sampling, Text
from .rows import Queue, Rows, Running
from .scheduler import Engine, Model
from .tenants import TenantPlan, TenantsError, read_tenants
from .traces import TraceError, open_trace
from .workload import builtin_tenants, builtin_workload

__all__ = [
    "Blocks",
    "Cause",
    "Clock",
    "ClockModel",
    "Engine",
    "Literal",
    "Model",
    "Prompt",
    "Queue",
    "Request",
    "Rows",
    "Running",
    "Sampling",
    "StepTime",
    "TenantPlan",
    "TenantsError",
    "Text",
    "TraceError",
    "VirtualClock",
    "WallClock",
    "builtin_tenants",
    "builtin_workload",
    "open_trace",
    "read_tenants",
]
