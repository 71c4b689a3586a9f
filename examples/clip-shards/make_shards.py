"""Write scikit-learn's captioned digits as tar shards: members ``.image.npy``, ``.txt``, ``.cls``.

    python examples/clip-shards/make_shards.py [FOLDER]

They are the samples of examples/clip-digits, in the same order.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np

from mmplan.zoo.digits import DIGITS, TEMPLATES, captioned

SHARDS = 4


def main(folder: Path) -> None:
    """Write the shards into a folder."""
    data = captioned("train")
    bounds = [len(data) * k // SHARDS for k in range(SHARDS + 1)]
    for number in range(SHARDS):
        with tarfile.open(folder / f"digits-{number:03d}.tar", "w") as tar:
            for index in range(*bounds[number : number + 2]):
                label = int(data.labels[index])
                image = io.BytesIO()
                np.save(image, data.images[index].numpy())
                caption = TEMPLATES[int(data.templates[index])].format(DIGITS[label])
                _add(tar, f"{index:06d}.image.npy", image.getvalue())
                _add(tar, f"{index:06d}.txt", caption.encode())
                _add(tar, f"{index:06d}.cls", str(label).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
