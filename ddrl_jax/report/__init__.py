"""The page a run leaves behind: sample videos, plots, the hacking verdict, one HTML file.

Reads a run's working directory and nothing else of ddrl_jax, so that it also works on a copied
directory, on a run that is still going on, and on a machine without jax.
"""

from __future__ import annotations

from ddrl_jax.report.html import write_report
from ddrl_jax.report.verdict import Verdict, verdict

__all__ = ["Verdict", "verdict", "write_report"]
