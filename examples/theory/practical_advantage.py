"""What DDRL's practical advantage converges to: a distribution with an atom, unless data_beta is large.

With the group-normalised advantage A = (r - E_p r)/std_p r in place of lambda((r - Z)/beta), the flow of densities is
dp/dt = (A - data_beta) p + data_beta p_data: the Fisher-Rao gradient of E_p[A] - data_beta KL(p_data || p), A held
fixed and renewed. Its rest point is

    p = data_beta p_data / (c - A),  c = data_beta,

and where that holds less than all of the mass the rest sits on the reward's maximum. Run on a grid for p_data = N(0,1)
and r = x on [-4,4], from p_data, and compared with the closed form. About 10 s.
"""

from __future__ import annotations

import numpy as np
from claims import BLUE, INK, ORANGE, PURPLE, TEAL, Claims, arguments, new_figure, save

from ddrl_jax import group_advantages

TOP = 4.0
NUM_CELLS = 161
SHOWN = (8.0, 3.0, 1.0, 0.3)


def grid() -> tuple[np.ndarray, np.ndarray]:
    """Rewards (= positions) of the cells and p_data's mass in each; the ends are the ends of the interval."""
    x = np.linspace(-TOP, TOP, NUM_CELLS)
    data = np.exp(-0.5 * x**2)
    return x, data / data.sum()


def moments(p: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    mean = float(p @ x)
    return mean, float(np.sqrt(p @ (x - mean) ** 2))


def gradient_flow(data: np.ndarray, x: np.ndarray, data_beta: float, time: float, dt: float = 0.02):
    """(p at `time`, times, mean reward, mass in the cell of the maximum), from p_data. A is renewed every dt.

    With A held, each cell obeys a linear equation, which is solved exactly over dt.
    """
    p, history = data.copy(), []
    for i in range(round(time / dt)):
        mean, std = moments(p, x)
        if i % 20 == 0:
            history.append((i * dt, mean, p[-1]))
        rate = (x - mean) / std - data_beta
        grown = np.expm1(rate * dt)
        p = p * (1.0 + grown) + data_beta * data * np.where(np.abs(rate) > 1e-12, grown / np.where(rate, rate, 1.0), dt)
        p /= p.sum()
    return p, *np.array(history).T


def closed_form(data_beta: float, data: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, float]:
    """(p, atom). Where there is an atom, c = A(top) = data_beta fixes mean and std: with d = top - x,
    E_p[d] = data_beta s and E_p[d^2] = data_beta s E_data[d], hence s = data_beta E_data[d]/(1 + data_beta^2)."""
    d = TOP - x[:-1]
    std = data_beta * (data[:-1] @ d) / (1.0 + data_beta**2)
    p = np.append(data_beta * std * data[:-1] / d, 0.0)
    if p.sum() < 1.0:
        p[-1] = 1.0 - p.sum()
        return p, float(p[-1])
    # No atom: mean and std are those of data_beta p_data/(data_beta - A) itself, found by iteration.
    mean, std = moments(data, x)
    for _ in range(20_000):
        slack = data_beta - (x - mean) / std
        if slack.min() <= 0.0:
            std *= 1.01
            continue
        p = data_beta * data / slack
        p /= p.sum()
        new_mean, new_std = moments(p, x)
        if abs(new_mean - mean) + abs(new_std - std) < 1e-13:
            break
        mean, std = 0.7 * mean + 0.3 * new_mean, 0.7 * std + 0.3 * new_std
    return p, 0.0


def atom_formula(data_beta: float, data: np.ndarray, x: np.ndarray) -> float:
    """1 - data_beta^2/(1 + data_beta^2) E_data[top/(top - x)], at least 0 (for data of mean 0)."""
    inside = (data[:-1] * TOP / (TOP - x[:-1])).sum()
    return max(0.0, 1.0 - data_beta**2 / (1.0 + data_beta**2) * inside)


def main() -> None:
    args, claims = arguments(__doc__), Claims()
    x, data = grid()

    print("data_beta   mass at the maximum: flow, closed form     mean reward   |p - closed form|")
    flows = {}
    for data_beta in SHOWN:
        p, times, mean_t, atom_t = gradient_flow(data, x, data_beta, time=600.0)
        exact, atom = closed_form(data_beta, data, x)
        distance = 0.5 * np.abs(p - exact).sum()
        mean, std = moments(p, x)
        flows[data_beta] = (p, times, mean_t, atom_t)
        print(f"{data_beta:9.2f}   {p[-1]:24.4f}, {atom:11.4f} {mean:15.3f} {distance:15.1e}")
        claims.check(distance < 2e-3, f"data_beta {data_beta}: the flow rests on the closed form (total variation)")
        top_advantage = (TOP - mean) / std
        if atom > 0.0:
            claims.check(abs(top_advantage - data_beta) < 2e-3, f"data_beta {data_beta}: A at the maximum is data_beta")
        else:
            claims.check(top_advantage < data_beta, f"data_beta {data_beta}: A stays under data_beta, no atom")
    for data_beta, mass in ((3.0, 0.026), (1.0, 0.459)):
        claims.check(abs(flows[data_beta][0][-1] - mass) < 0.002, f"data_beta {data_beta}: an atom of {mass}")

    # The library's advantage is this A: a large group of draws from p, against the grid's mean and std.
    p = flows[3.0][0]
    rewards = np.random.default_rng(0).choice(x, 40_000, p=p)
    mean, std = moments(p, x)
    gap = np.abs(np.asarray(group_advantages(rewards, rewards.size)) - (rewards - mean) / std).max()
    claims.check(gap < 0.05, f"group_advantages of one large group is A (largest gap {gap:.3f})")

    figure, (left, middle, right) = new_figure(3)
    left.plot(x, data / (x[1] - x[0]), color=INK, ls=":", label="data")
    bar_at = TOP
    for data_beta, color, dash in zip(SHOWN, (TEAL, BLUE, ORANGE, PURPLE), ("-", "--", "-.", (0, (1, 1))), strict=True):
        p, times, mean_t, atom_t = flows[data_beta]
        left.plot(x[:-1], p[:-1] / (x[1] - x[0]), color=color, ls=dash, label=f"data_beta {data_beta:g}")
        if p[-1] > 0.005:
            bar_at += 0.2  # side by side, right of the maximum where they all lie
            left.plot([bar_at, bar_at], [0.0, p[-1]], color=color, lw=3)
        keep = times <= 40.0
        middle.plot(times[keep], mean_t[keep], color=color, ls=dash)
    left.set(title="Rest points (bars: atom at 4)", xlabel="reward r = x", ylabel="density")
    left.legend(loc="upper left")
    middle.axhline(TOP, color=INK, lw=0.8, ls=":")
    middle.set(title="The way there", xlabel="training time", ylabel="mean reward")
    betas = np.geomspace(0.1, 10.0, 200)
    right.plot(betas, [atom_formula(b, data, x) for b in betas], color=INK)
    for data_beta, color in zip(SHOWN, (TEAL, BLUE, ORANGE, PURPLE), strict=True):
        right.plot(data_beta, flows[data_beta][0][-1], "o", color=color)
    right.set(title="Mass of the atom", xlabel="data_beta", xscale="log", ylim=(-0.03, 1.03))
    right.set_xticks([0.1, 1.0, 10.0], ["0.1", "1", "10"])
    save(figure, args.out, "theory_4.svg")
    claims.finish()


if __name__ == "__main__":
    main()
