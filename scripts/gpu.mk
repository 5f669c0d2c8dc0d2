# The Makefile includes this. Machines with a GPU have a Python and a torch of their own: nothing comes from the network.

##@ GPU

# gpu-load-dtype wants a real device, on which torch converts.
GPU_CASES ?= gpu-load-hot gpu-load-first gpu-load-tmpfs gpu-load-many gpu-load-encrypted gpu-load-decrypting gpu-load-crc32 \
  gpu-load-sha256 gpu-load-dtype gpu-load-http gpu-save-tmpfs gpu-save-encrypted
GPU_ARGS ?=
.PHONY: gpu-check gpu-sanitize gpu-costs bench-gpu
gpu-check:  ## build and run the GPU tests with this machine's own torch (GPU_ARGS=--fake: over the fake driver)
	@scripts/gpu_check.sh $(GPU_ARGS)

# Each tool runs, whatever the ones before it find.
gpu-sanitize:  ## the tests of kernels on a GPU, under NVIDIA's compute-sanitizer
	@failed=; for tool in memcheck racecheck initcheck synccheck; do echo "== $$tool"; \
	  scripts/gpu_check.sh --sanitize $$tool $(GPU_ARGS) || failed="$$failed $$tool"; done; \
	  [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

gpu-costs:  ## what copies, pinning, allocation and calls of the driver cost on a GPU (BENCH_ARGS='--json FILE')
	@scripts/gpu_check.sh --build build/gpu-venv/bin/python -m benchmarks.device_costs $(BENCH_ARGS)

bench-gpu:  ## loads to and saves from the GPU against the link and others (SIZE=16GB; BENCH_FAKE_CUDA=1 to try it out)
	@scripts/gpu_check.sh --build $(if $(BENCH_FAKE_CUDA),--fake) bash -ec '\
	  $(if $(BENCH_FAKE_CUDA),build/gpu-venv/bin/python -m benchmarks.model_gpu --runs $(RUNS);) \
	  build/gpu-venv/bin/python -m benchmarks --size $(SIZE) --runs $(RUNS) --cases $(filter-out $(if $(BENCH_FAKE_CUDA),gpu-load-dtype),$(GPU_CASES)) \
	  $(if $(CONTENDERS),--contenders $(CONTENDERS)) $(BENCH_ARGS)'

# The share of a modelled link that loads and saves fill, on a machine without a GPU (CASES, SIZE as a number of bytes, RUNS).
.PHONY: model-gpu
model-gpu: $(VENV)/stamp-build  ## loads and saves over a modelled link (CASES='plain save'; BENCH_ARGS='--package FOLDER' compares)
	$(BIN)/python -m benchmarks.model_gpu --runs $(RUNS) $(if $(CASES),--cases $(CASES)) $(BENCH_ARGS)

# The kernels of the device are compiled by nvcc to text that is committed; a build needs no nvcc.

.PHONY: gpu-kernels kernels-check kernels-report kernels-mutate
gpu-kernels:  ## compile the device's kernels to csrc/device/cuda/kernels/kernels.ptx (wants nvcc)
	@$(PYTHON) scripts/kernels.py build

kernels-check:  ## is the committed text that of the sources? (compared to the byte where its nvcc is here)
	@$(PYTHON) scripts/kernels.py check

kernels-report:  ## registers and spills of the kernels for every architecture (wants ptxas)
	@$(PYTHON) scripts/kernels.py report

kernels-mutate: system-native  ## are wrong kernels caught by the native tests?
	@$(PYTHON) scripts/kernels.py mutate
