"""The reference scheduler, and what it takes to replay request traces through a pool without a model.

`Engine` is the scheduler. `ClockModel` stands in for a model and only takes time. `open_trace`, `servegen`
and `workload` give requests; `tenants` says who sends them; `replay` puts all of it together and measures.
"""

from .clock import Clock, ClockModel, StepTime, VirtualClock, WallClock
from .request import Blocks, Cause, Literal, Prompt, Request, Text
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
