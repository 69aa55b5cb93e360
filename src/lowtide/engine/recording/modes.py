"""The dispatch modes of lowtide, as far as they are alike: they leave compiled code compiled."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EngineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees ops below autograd, and a compiled region as a whole."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: what they make is opaque to us, and so a source (Rule 9)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The default wraps every dispatch in a call that costs 3 µs; `torch_compat.never_compile` does not."""
        return False
