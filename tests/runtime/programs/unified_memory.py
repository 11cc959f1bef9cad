"""Prints the options with which jaxlib would start its GPU client under unified memory."""

import json
import os

from jaxlib import xla_client

from jtrain.runtime import platform

platform.use_unified_memory(os.environ)
print(json.dumps([xla_client.generate_pjrt_gpu_plugin_options(), os.environ["TF_FORCE_UNIFIED_MEMORY"]]))
