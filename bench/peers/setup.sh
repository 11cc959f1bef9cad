#!/bin/sh
# Makes the Python environment of the peers that need torch: torchdata, WebDataset and MosaicML streaming for the data
# benchmarks (data --only memory mixing resume), transformers for the CPU step (cpu_step).
#
#     sh bench/peers/setup.sh [FOLDER]      default: /tmp/jtrain-peers; about 1.2 GB, needs a package index
#     export PEER_TORCH_PYTHON=/tmp/jtrain-peers/bin/python
#
# PYTHON names the interpreter (default: python3.11). Grain is no part of it: it is a dependency of jtrain, and its side of
# the benchmarks runs in jtrain's own environment.
set -eu
folder=$(realpath -m "${1:-/tmp/jtrain-peers}")

"${PYTHON:-python3.11}" -m venv "$folder"
pip="$folder/bin/pip install -qq"
$pip torch==2.13.0+cpu || {
    echo "setup.sh: pip found no CPU build of torch 2.13.0. Where the package index has only the CUDA build, run" \
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu sh bench/peers/setup.sh $folder" >&2
    exit 1
}
$pip torchdata==0.11.0 webdataset==1.0.2 transformers==5.23.0 pyarrow==26.0.1 numpy==2.4.6

# mosaicml-streaming asks for transformers < 5, numpy < 2.2, torchvision and the clients of six clouds, so it is installed
# without its dependencies. Text on a local disk needs only the packages below.
$pip --no-deps mosaicml-streaming==0.13.0
$pip catalogue==2.0.10 Brotli==1.2.1 python-snappy==0.7.3 zstd==1.5.7.2 "xxhash<4" pillow 2>&1 |
    { grep -v "dependency resolver\|mosaicml-streaming 0.13.0 requires" || true; }

# streaming imports its datasets of images, and these torchvision, of which no build fits the CPU build of torch. A stub
# takes their place. A stub of torchvision itself would reach transformers, which then asks it for names it lacks.
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo '"""Stub written by setup.sh: the benchmarks read text, and the datasets of images need torchvision."""' \
    >"$site/streaming/vision/__init__.py"

"$folder/bin/python" -c "import torch, torchdata, webdataset, pyarrow, streaming; from transformers import LlamaForCausalLM"
echo "export PEER_TORCH_PYTHON=$folder/bin/python"
