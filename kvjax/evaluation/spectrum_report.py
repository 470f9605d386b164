"""What `path_spectrum` found: figures, tables and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STATES = {"k": "keys", "v": "values"}


@dataclass(frozen=True)
class Spectrum:
    """Energy along the eigen-directions of each head's keys (or values) and of their changes, largest first."""

    states: np.ndarray
    """[L, G, d]: squared length per token along each direction."""
    changes: np.ndarray
    """[L - 1, G, d]: of state l + 1 minus state l."""

    @property
    def ratio(self) -> np.ndarray:
        """[L - 1, G]: energy of a change over that of the state which it leads to. Above 1 it saves nothing."""
        return self.changes.sum(-1) / self.states[1:].sum(-1)

    def lost(self) -> tuple[np.ndarray, np.ndarray]:
        """Share of a state's energy, [L - 1, G, d] for the layers after the first, that is lost with r = 1 .. d
        directions of its own, and with the layer before it and r directions of the change."""
        return 1 - kept(self.states[1:]), self.ratio[..., None] * (1 - kept(self.changes))


def kept(energy: np.ndarray) -> np.ndarray:
    """Share of the energy [..., d] (largest first) in the first 1 .. d directions. Where there is none, nothing is
    lost: 1."""
    total = energy.sum(-1, keepdims=True)
    return np.where(total > 0, np.cumsum(energy, axis=-1) / np.where(total > 0, total, 1), 1.0)


def ranks(width: int) -> tuple[int, ...]:
    """The numbers of directions that are reported: one; an eighth, a quarter and a half of a head's width."""
    return tuple(sorted({1, *(max(width // part, 1) for part in (8, 4, 2))}))


def markdown(spectra: dict[str, Spectrum]) -> str:
    """Means over layers and heads, then a table of the layers for the keys and one for the values."""
    return "\n\n".join([_summary(spectra), *(f"{title.capitalize()}, means over heads:\n\n{_layers(spectra[name])}"
                                             for name, title in STATES.items())]) + "\n"


def _summary(spectra: dict[str, Spectrum]) -> str:
    chosen = ranks(spectra["k"].states.shape[-1])
    lines = [f"| share of energy, r = | {' | '.join(map(str, chosen))} |", f"|---|{'--:|' * len(chosen)}"]
    for name, title in STATES.items():
        own, as_change = spectra[name].lost()
        rows = {f"{title}: kept by r directions": kept(spectra[name].states),
                f"changes of {title}: kept by r directions": kept(spectra[name].changes),
                f"{title}: lost with r directions of their own": own,
                f"{title}: lost with the layer before and r directions of the change": as_change}
        lines += [f"| {row} | {' | '.join(f'{shares[..., r - 1].mean():.3f}' for r in chosen)} |"
                  for row, shares in rows.items()]
    lines += [f"\nChange over state, energy: keys {spectra['k'].ratio.mean():.3f}, values "
              f"{spectra['v'].ratio.mean():.3f} (means over heads and layers)."]
    return "\n".join(lines)


def _layers(spectrum: Spectrum) -> str:
    chosen = ranks(spectrum.states.shape[-1])
    states, changes, ratio = kept(spectrum.states).mean(1), kept(spectrum.changes).mean(1), spectrum.ratio.mean(1)
    head = [f"state, r = {r}" for r in chosen] + [f"change to the next, r = {r}" for r in chosen]
    lines = [f"| layer | {' | '.join(head)} | change / state |", f"|--:|{'--:|' * (len(head) + 1)}"]
    for layer, own in enumerate(states):
        cells = [f"{own[r - 1]:.3f}" for r in chosen]
        cells += [f"{changes[layer][r - 1]:.3f}" for r in chosen] if layer < len(changes) else ["–"] * len(chosen)
        cells += [f"{ratio[layer]:.3f}"] if layer < len(ratio) else ["–"]
        lines.append(f"| {layer + 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def content(spectra: dict[str, Spectrum]) -> dict[str, Any]:
    """All figures for JSON: by layer and head."""
    def at(shares: np.ndarray) -> dict[str, Any]:
        return {str(r): np.round(shares[..., r - 1], 6).tolist() for r in ranks(shares.shape[-1])}
    return {title: {"states_kept": at(kept(spectra[name].states)), "changes_kept": at(kept(spectra[name].changes)),
                    "change_over_state": np.round(spectra[name].ratio, 6).tolist(),
                    "mean_states_kept": np.round(kept(spectra[name].states).mean((0, 1)), 6).tolist(),
                    "mean_changes_kept": np.round(kept(spectra[name].changes).mean((0, 1)), 6).tolist()}
            for name, title in STATES.items()}


def plot(spectra: dict[str, Spectrum], path: Path) -> None:
    """Draws for keys and for values: energy kept against directions, the same by layer, and changes over states."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(15, 8), layout="constrained")
    for row, (name, title) in zip(figure.subplots(2, 3), STATES.items(), strict=True):
        _plot_curves(row[0], spectra[name], title)
        _plot_layers(row[1], spectra[name], title)
        _plot_ratio(row[2], spectra[name], title)
    figure.savefig(path, dpi=110)


COLOURS = {"states": "tab:blue", "changes": "tab:red"}


def _plot_curves(axes: Any, spectrum: Spectrum, title: str) -> None:
    for name, colour in COLOURS.items():
        shares = kept(getattr(spectrum, name)).mean(1)
        r = np.arange(1, shares.shape[-1] + 1)
        axes.plot(r, shares.T, color=colour, alpha=0.15, linewidth=0.8)
        axes.plot(r, shares.mean(0), color=colour, linewidth=2.5, label=f"{name} (thin: single layers)")
    axes.set(title=f"{title}: energy kept by the first r directions", xlabel="r", ylim=(0, 1.02), xlim=(1, r[-1]))
    axes.legend(loc="lower right")


def _plot_layers(axes: Any, spectrum: Spectrum, title: str) -> None:
    for r, style in zip(ranks(spectrum.states.shape[-1])[1:], (":", "--", "-"), strict=False):
        for (name, colour), first in zip(COLOURS.items(), (1, 1.5), strict=True):
            shares = kept(getattr(spectrum, name))[..., r - 1].mean(1)
            axes.plot(first + np.arange(len(shares)), shares, style, color=colour, label=f"{name}, r = {r}")
    axes.set(title=f"{title}: energy kept, by layer (changes between layers)", xlabel="layer", ylim=(0, 1.02))
    axes.legend(loc="lower right", ncols=3, fontsize="small")


def _plot_ratio(axes: Any, spectrum: Spectrum, title: str) -> None:
    pairs = 1.5 + np.arange(len(spectrum.ratio))
    axes.plot(pairs, spectrum.ratio, color="tab:grey", alpha=0.5, linewidth=0.8)
    axes.plot(pairs, spectrum.ratio.mean(1), color="black", linewidth=2.5, label="mean over heads (thin: heads)")
    axes.axhline(1, color="tab:red", linestyle="--", label="as large as the state: saves nothing")
    axes.set(title=f"{title}: |change|² / |next state|²", xlabel="layer", ylim=(0, 1.3 * max(spectrum.ratio.max(), 1)))
    axes.legend(loc="upper right")
