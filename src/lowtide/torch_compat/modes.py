"""The base class of lowtide's dispatch modes. Compiled code stays compiled under them."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EngineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that receives ops below autograd, and a compiled region as one op."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled. Their results are opaque memory, so they are sources (Rule 9)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. The default adds 3 µs to every dispatch. See `never_compile`."""
        return False
