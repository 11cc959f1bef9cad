#!/bin/sh
# Makes the Python environment of the peers that need torch: torchdata, WebDataset and MosaicML streaming for the data
# benchmarks (data_memory, data_mixing, data_resume, data_sources), transformers for the CPU step (cpu_step).
#
#     jtrain/bench/peers/setup.sh [FOLDER]         default: /tmp/jtrain-peers; about 1.2 GB, needs a package index
#     export PEER_TORCH_PYTHON=/tmp/jtrain-peers/bin/python
#
# PYTHON names the interpreter (default: python3.11). Where the package index serves only the CUDA build of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. Grain is no part of it: it is a dependency of
# jtrain, and its side of the benchmarks runs in jtrain's own environment.
set -eu
folder=$(realpath -m "${1:-/tmp/jtrain-peers}")

"${PYTHON:-python3.11}" -m venv "$folder"
pip="$folder/bin/pip install --quiet"
$pip torch==2.13.0 torchdata==0.11.0 webdataset==1.0.2 transformers==5.23.0 pyarrow==26.0.1 numpy==2.4.6

# mosaicml-streaming asks for transformers < 5, numpy < 2.2, torchvision and the clients of six clouds, so it is installed
# without its dependencies. Text on a local disk needs only the packages below; data_mosaicml.py replaces the part of
# streaming that imports torchvision, of which no build fits the CPU build of torch.
$pip --no-deps mosaicml-streaming==0.13.0
$pip catalogue==2.0.10 Brotli==1.2.1 python-snappy==0.7.3 zstd==1.5.7.2 "xxhash<4" pillow 2>&1 |
    { grep -v "dependency resolver\|mosaicml-streaming 0.13.0 requires" || true; }

cd "$(dirname "$0")"
"$folder/bin/python" -c "import torch, torchdata, transformers, webdataset, pyarrow, data_mosaicml"
echo "export PEER_TORCH_PYTHON=$folder/bin/python"
