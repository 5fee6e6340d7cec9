"""Makes stand-ins for the CUDA libraries that PyPI's torch is linked with, beside torch's own.

They are 3 GB, and on a machine without a GPU all that torch wants of them is that they can be loaded.
Every function answers `cudaErrorNoDevice`, so torch finds no GPU. Called with torch's `lib` folder.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

lib = Path(sys.argv[1])
OURS = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)\w*\.so\.\d+")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


needed, versions, wanted = set(), {}, set()
for path in sorted(lib.glob("*.so")):
    for line in output("objdump", "-p", path).splitlines():
        words = line.split()
        if words[:1] == ["NEEDED"]:
            needed.add(words[1])
        elif words[:2] == ["required", "from"]:
            library = words[2].rstrip(":")
        elif len(words) == 4 and words[0].startswith("0x") and OURS.fullmatch(library):
            versions[words[3]] = library
    for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", path).splitlines():
        wanted.add(line.split()[-1])

names = {library: [] for library in needed if OURS.fullmatch(library) and not (lib / library).exists()}
if not names:
    sys.exit()
# What torch asks for without a version is found wherever it is.
any_library = min(names)
for symbol in sorted(wanted):
    name, _, version = symbol.partition("@")
    library = versions.get(version.lstrip("@"))
    if library in names:
        names[library].append((name, version.lstrip("@")))
    elif not version and re.match(r"cu|nccl|nv", name):
        names[any_library].append((name, None))
for library, symbols in names.items():
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        # 100 is cudaErrorNoDevice.
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name, _ in symbols))
        text = ""
        for version in sorted({version for _, version in symbols if version}):
            inside = "".join(f"{name}; " for name, other in symbols if other == version)
            text += f"{version} {{ global: {inside}}};\n"
        script.write_text(text)
        flags = [f"-Wl,--version-script={script}"] if text else []
        subprocess.run(
            ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", *flags, "-o", lib / library, source],
            check=True,
        )
