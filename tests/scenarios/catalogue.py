"""All scenarios. Importing a group registers its scenarios."""

from __future__ import annotations

from . import flags, gan, handles, losses, optimizers, parameters, penalties, pipelines, recurrent, teachers
from .training import SCENARIOS, Scenario

GROUPS = (flags, gan, handles, losses, optimizers, parameters, penalties, pipelines, recurrent, teachers)
ALL: dict[str, Scenario] = SCENARIOS.by_name
