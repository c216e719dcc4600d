import os
import signal
import threading

if threading.current_thread() is threading.main_thread():
    # What a shell runs in the background ignores Ctrl-C, and so would all processes that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests compile many small programs and run each once: without LLVM's optimizations they take less than half the time.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}".strip()

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
