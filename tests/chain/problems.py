"""A small chain with its adjoint and tape, and its reference adjoint from storing every state."""

import numpy as np

X0 = np.linspace(0.1, 1.0, 50)


def step(x, i):
    return np.sin(x) + 0.1 * np.cos(i) * x


def adjoint_step(x, lam, i):
    return (np.cos(x) + 0.1 * np.cos(i)) * lam


def tape_step(x, i):
    return step(x, i), np.cos(x) + 0.1 * np.cos(i)


def adjoint_tape(tape, lam, i):
    return tape * lam


def storing_all(n, x=X0, final=lambda x: 2 * x):
    states = [x]
    for i in range(n):
        states.append(step(states[-1], i))
    lam = final(states[-1])
    for i in reversed(range(n)):
        lam = adjoint_step(states[i], lam, i)
    return lam


class Counted:
    """A function that records the last argument of each call: the step index."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *args):
        self.calls.append(args[-1])
        return self.function(*args)


def storing_final(n):
    x = X0
    for i in range(n):
        x = step(x, i)
    return x


class BoomError(Exception):
    """An exception of the user."""
