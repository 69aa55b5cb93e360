"""Global settings of torch. Private names save a Python frame, and every replay reads the settings."""

from __future__ import annotations

from collections.abc import Callable

import torch

is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

only_warns_if_not_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only

matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
