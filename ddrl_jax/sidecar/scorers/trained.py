"""Writes the weights of scorers that are trained here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn


def write(out: str, net: nn.Module, weights_file: str, config: dict[str, Any], config_file: str) -> Path:
    """The network's tensors and what its `load` needs to know, each whole or not there. Returns the folder.

    The JSON comes last: a folder that has it is complete.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(net.state_dict(), folder / f"{weights_file}.partial")
    os.replace(folder / f"{weights_file}.partial", folder / weights_file)
    (folder / f"{config_file}.partial").write_text(json.dumps(config, indent=1))
    os.replace(folder / f"{config_file}.partial", folder / config_file)
    return folder
