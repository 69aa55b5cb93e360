"""The gradient of a 2-D wave simulation of 2000 steps, in 4 MiB instead of 281 MiB.

    python examples/wave_adjoint.py

A pulse runs through a medium. The misfit at the end is differentiated with respect to the speed in every cell and to
the initial wave. A Taylor test checks the gradient, and `tracemalloc` measures the peak.
"""

import tracemalloc

import numpy as np

from lowtide.chain import grad, taylor_test

SIZE, STEPS, BUDGET = 96, 2000, "4 MiB"
SCRATCH = 4 * 8 * SIZE * SIZE  # allocated by one step: up to four fields


def laplacian(u):
    out = -4 * u
    out[1:] += u[:-1]
    out[:-1] += u[1:]
    out[:, 1:] += u[:, :-1]
    out[:, :-1] += u[:, 1:]
    return out


def make_step(medium):
    """Return the step. The state is (previous wave, wave); `medium` is (speed · Δt / Δx)² in every cell."""

    def step(state, i):
        before, now = state
        after = laplacian(now)
        after *= medium
        after += 2 * now
        after -= before
        return now.copy(), after

    return step


def make_adjoint_step(medium):
    """Return the adjoint step. The adjoint is (of previous wave, of wave, gradient of the medium so far)."""

    def adjoint_step(state, adjoint, i):
        of_now, of_after, gradient = adjoint
        gradient += of_after * laplacian(state[1])
        of_now += 2 * of_after
        of_now += laplacian(medium * of_after)
        return -of_after, of_now, gradient

    return adjoint_step


def simulate(medium, wave, target):
    """Return the misfit at the end of a forward run."""
    step, state = make_step(medium), (wave, wave)
    for i in range(STEPS):
        state = step(state, i)
    return 0.5 * float(np.sum((state[1] - target) ** 2))


def main():
    x, y = np.meshgrid(*2 * [np.linspace(0, 1, SIZE)])
    medium = 0.1 + 0.05 * np.exp(-20 * ((x - 0.7) ** 2 + (y - 0.5) ** 2))
    wave = np.exp(-200 * ((x - 0.3) ** 2 + (y - 0.5) ** 2))
    target = 0.5 * wave

    def final_adjoint(state):
        return np.zeros_like(wave), state[1] - target, np.zeros_like(medium)

    tracemalloc.start()
    (of_before, of_wave, of_medium), report = grad(
        make_step(medium),
        make_adjoint_step(medium),
        (wave, wave),
        STEPS,
        adjoint=final_adjoint,
        budget=BUDGET,
        scratch=SCRATCH,
        check_determinism=True,
    )
    measured_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    print(report)
    print(f"  measured       {measured_bytes / 2**20:.2f} MiB by tracemalloc, of {BUDGET}")
    print(f"  storing every state would take {STEPS * 2 * wave.nbytes / 2**20:.0f} MiB")

    point = {"medium": medium, "wave": wave}
    gradient = {"medium": of_medium, "wave": of_before + of_wave}
    direction = {"medium": 0.01 * np.sin(7 * x) * np.cos(5 * y), "wave": np.cos(9 * x * y)}
    check = taylor_test(lambda p: simulate(p["medium"], p["wave"], target), gradient, point, direction)
    print(check)
    return report, measured_bytes, check


if __name__ == "__main__":
    main()
