"""One model, in the process that this is: prints its rows as JSON, one a line."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch

from benchmarks.packages import models
from benchmarks.packages.measuring import rows_of

MARK = "row: "


def main() -> None:
    """Measure the model that the first argument names; an exception ends it as any program."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["YOLO_CONFIG_DIR"] = folder  # Where ultralytics writes settings as it is imported.
        for row in rows_of(models.MODELS[sys.argv[1]]):
            print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
