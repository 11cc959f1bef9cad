#!/bin/sh
# Makes one Python environment with torch, peft and transformers 4 and one with transformers 5, and writes the reference
# directories beside this script, the adapters of tests/golden/peft and the golden arrays of tests/families anew.
#
#     tests/golden/hf/setup.sh [FOLDER]        default: /tmp/jtrain-transformers; about 2 GB, needs a package index
#
# PYTHON names the interpreter (default: python3.11). Where the package index serves only the CUDA build of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. The environments stay, so that exports can be checked and
# families proved:
#
#     PEER_TORCH_PYTHON=/tmp/jtrain-transformers/v5/bin/python pytest -m slow tests/hf
#     python -m jtrain.hf prove qwen3 --torch-python /tmp/jtrain-transformers/v5/bin/python
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-/tmp/jtrain-transformers}

install() {
    "${PYTHON:-python3.11}" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet torch==2.13.0 "transformers==$2" safetensors==0.8.0 numpy==2.4.6 \
        peft==0.21.2
}

install v4 4.57.6
install v5 5.23.0

# Version 4 comes first: under version 5, make_moe.py loads and saves what version 4 wrote.
for version in v4 v5; do
    "$folder/$version/bin/python" "$here/make.py"
    "$folder/$version/bin/python" "$here/make_moe.py"
    "$folder/$version/bin/python" "$here/../peft/make.py"
done
PYTHONPATH="$here/../../../jtrain/hf/peers" "$folder/v5/bin/python" "$here/../../families/peers/make.py"
