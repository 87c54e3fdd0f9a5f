# make demo | test | test-slow | ...      VENV=/some/path make ... uses or creates the environment there.

PYTHON ?= python3
SET ?=
VENV ?= .venv$(addprefix -,$(SET))
PY := $(VENV)/bin/python
COMPOSER := PATH="$(abspath $(VENV))/bin:$$PATH" composer
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# SET=newest takes the second set of packages, for the newest cards. The environment is as new as the lock: a stamp with the
# lock's checksum says what was installed.
ifneq ($(filter-out newest,$(SET))$(word 2,$(SET)),)
$(error SET: '$(SET)' is no set of packages. Possible: newest, or leave it out)
endif
LOCK := requirements$(addprefix /,$(SET)).lock
LOCK_SUM := $(shell sha256sum $(LOCK) | cut -c1-12)
STAMP = $(VENV)/.easel-$(LOCK_SUM)

SHAPES := cache/miniature
TORCHAO := torchao==$(if $(filter newest,$(SET)),0.18.0,0.16.0)# for torch 2.15, for torch 2.10
TABLES = tables-$(shell sha256sum requirements/tables.lock | cut -c1-12)
DASHBOARD = dashboard-$(shell sha256sum requirements/dashboard.lock | cut -c1-12)
CLUSTER = cluster-$(shell sha256sum requirements/prepare.lock | cut -c1-12)
BROWSER = browser-$(shell sha256sum requirements/browser.lock | cut -c1-12)
CLOUDS = $(VENV)/clouds-$(shell sha256sum requirements/clouds.lock | cut -c1-12)
ONLY ?=
CHECKS = $(VENV)/checks-$(shell sha256sum requirements/dev.lock | cut -c1-12)
LINTS := format rules spelling yaml shell large secrets types
ifndef NAME
NAME := shapes-$(shell date +%Y%m%d-%H%M%S)
endif

ifneq ($(words $(VENV)),1)
$(error VENV: '$(VENV)' has a space in it, or is empty. Possible: a path without one. Run: VENV=/some/path make ...)
endif
# Of two at once the second says that it waits, and then finds the work done.
ALONE = flock -n $(1) true || echo "$(1): another make is at it; waiting" >&2; flock $(1)

.PHONY: help env lock lint $(addprefix lint-,$(LINTS)) hooks audit test test-quick test-slow test-long test-8bit test-tables test-cluster test-dashboard test-browser test-store test-faults mutants test-gpu download_assets miniature miniature-files demo controls controls-files flux-files demo-flux controls-flux moving-files demo-video controls-video study-files study gpu gpu-latency report clean test-health test-clouds test-image build_docker launch_docker build_and_launch_docker exec_docker stop_docker

help:  ## this text
	@echo "VENV=$(VENV) PYTHON=$(PYTHON) make TARGET"; echo
	@grep -hE '^[a-z0-9_-]+:.*## ' Makefile | sed -E 's/^([a-z0-9_-]+):.*## (.*)/  \1\t\2/' | expand -t 26

env: $(STAMP)  ## make the environment from requirements.lock (about 8 GB, some minutes), and nothing else; SET=newest: the second set

$(STAMP): $(LOCK)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "PYTHON: $(PYTHON) is Python %d.%d. Possible: 3.11, 3.12, 3.13. Run: PYTHON=python3.11 make ..." % v)'
	@mkdir -p $(VENV)
	@$(call ALONE,$(VENV)) bash -euc 'test -e $@ || { set -x; \
	  $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	  $(PY) -m pip install --disable-pip-version-check -q --no-deps -r $(LOCK); rm -f $(VENV)/.easel-*; }; touch $@'

UV_COMPILE = $(VENV)/bin/uv pip compile -q --universal --python-version 3.11 --only-binary :all: --custom-compile-command "make lock"

lock: $(STAMP)  ## resolve requirements.txt and requirements/ anew into the locks, for Python 3.11 to 3.13
	$(UV_COMPILE) --override requirements/overrides.txt -c requirements.txt requirements.txt -o requirements.lock
	grep -vE '^(torch|torchvision|xformers)==' requirements.txt | $(UV_COMPILE) --override requirements/overrides.txt -c requirements/newest.txt - \
	  requirements/newest.txt -o requirements/newest.lock
	for beside in dev clouds; do $(UV_COMPILE) requirements/$$beside.txt -o requirements/$$beside.lock; done
	for extra in tables dashboard browser prepare; do \
	  $(UV_COMPILE) --no-annotate --override requirements/overrides.txt -c requirements.lock requirements/$$extra.txt | \
	  awk -F '[= ]' 'NR == FNR {has[$$1]} NR > FNR && (/^#/ || !($$1 in has))' requirements.lock - > requirements/$$extra.lock; done

$(CHECKS)/whole: | $(STAMP)
	@$(call ALONE,$(VENV)) bash -euc 'test -e $@ || { set -x; $(PY) -m venv $(@D); \
	  $(@D)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r requirements/dev.lock; touch $@; }'

lint: $(CHECKS)/whole  ## each check of .pre-commit-config.yaml: format, rules, spelling, YAML, shell, large files, secrets, types
	@$(MAKE) --no-print-directory -s -k -j2 -O $(addprefix lint-,$(LINTS))

lint-format: $(STAMP)
	$(VENV)/bin/ruff format --check -q .

lint-rules: $(STAMP)
	$(VENV)/bin/ruff check -q .

lint-spelling: $(CHECKS)/whole
	git ls-files -z | xargs -0 $(CHECKS)/bin/codespell

lint-yaml: $(CHECKS)/whole
	git ls-files -z '*.yaml' '*.cff' | xargs -0 $(CHECKS)/bin/yamllint --strict -d '{extends: relaxed, rules: {line-length: disable}}'

lint-shell: $(CHECKS)/whole
	git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 $(CHECKS)/bin/shellcheck --external-sources --severity=warning

lint-large: $(CHECKS)/whole
	git ls-files -z | xargs -0 $(CHECKS)/bin/check-added-large-files --enforce-all --maxkb=2048

# Left out: records, the passwords that tests make up, and digests of files that are published.
lint-secrets: $(CHECKS)/whole
	git ls-files -z | xargs -0 $(CHECKS)/bin/detect-secrets-hook --no-verify --exclude-files '^reports/results/' \
	  --exclude-secrets '^(secret|SECRET|test|test:tester|another|hunter2(hunter2|pw/[+]x)?|pw[12]?|plain|short)$$' \
	  --exclude-lines '^(PUBLISHED_SHA1|CAUSE) = '

lint-types: $(CHECKS)/whole
	flock $(CHECKS) $(CHECKS)/bin/mypy --cache-dir $(CHECKS)/mypy --python-executable $(PY) --no-error-summary

hooks: $(CHECKS)/whole  ## lint and the quickest tests before each commit, the fast ones before a push (git commit -n leaves them out)
	$(CHECKS)/bin/pre-commit install

audit: $(CHECKS)/whole  ## known faults of the locked packages; asks PyPI
	$(CHECKS)/bin/pip-audit --disable-pip --no-deps $(foreach lock,requirements/dev.lock $(LOCK),-r $(lock))

# Two commands at once, one for each of two cores; the output of the second is shown when the first has ended. If it is allowed,
# the second has its own shared memory and temporary folder, and $$apart is --apart for both: see tests/conftest.py. The
# variables of a Git hook lead to its repository, so they are removed; tests have others.
define both
@unset $$(git rev-parse --local-env-vars); export CUDA_VISIBLE_DEVICES= PATH="$(abspath $(VENV))/bin:$$PATH" apart=; output=$$(mktemp); own=$$(mktemp -d); failed=; \
  ! unshare -m mount -t tmpfs tmpfs /dev/shm 2>$$output || apart=--apart; \
  $${apart:+env TMPDIR=$$own unshare -m} bash -c 'test -z "$$apart" || mount -t tmpfs tmpfs /dev/shm && $(2)' >$$output 2>&1 & \
  $(1) || failed=1; \
  wait $$! || failed=1; cat $$output; rm $$output; test -z "$$failed"; rm -rf $$own
endef
half = $(PY) -m pytest -q --durations=20 -m "$(1)" $$apart --part=$(2)
both_halves = $(call both,$(call half,$(1),1),$(call half,$(1),2))

test-quick: $(STAMP)  ## the tests of the layout, the configuration, the locks and the pages: half a minute
	@unset $$(git rev-parse --local-env-vars); export CUDA_VISIBLE_DEVICES= PATH="$(abspath $(VENV))/bin:$$PATH"; \
	  $(PY) -m pytest -q -m "not slow" tests/test_layout.py tests/test_config.py \
	  tests/test_locks.py tests/test_readme.py

test: $(STAMP) lint  ## the tests that take no longer than some minutes in all
	$(call both_halves,not slow and not long and not gpu)

SUITES = OMP_NUM_THREADS=1 $(MAKE) --no-print-directory
test-slow: $(STAMP)  ## what CI runs too: a case of each kind of whole run, several processes, a fault of a store
	$(call both_halves,slow and not long and not gpu and not cluster)
	$(call both,$(SUITES) test-8bit test-cluster ONLY=short,$(SUITES) test-tables test-dashboard test-store test-browser test-clouds \
	  ONLY="short or stopped or flipped")

test-long: $(STAMP)  ## the further cases of whole runs, which CI leaves out
	$(call both_halves,long)

# Beside the environment, not in it: diffusers imports torchao wherever it is installed, which took 3.5 s of every start.
test-8bit: $(STAMP)  ## optimizer.states=8bit against torchao's, which is installed beside the environment for it
	test -e $(VENV)/$(TORCHAO) || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/$(TORCHAO) $(TORCHAO)
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/$(TORCHAO) $(PY) -m pytest -q tests/test_low_memory_adamw_8bit.py

test-tables: $(STAMP)  ## prepare.shards of Parquet files and Hugging Face datasets, with pyarrow and datasets, installed beside the environment
	test -e $(VENV)/$(TABLES) || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/$(TABLES) -r requirements/tables.lock
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/$(TABLES) $(PY) -m pytest -q tests/test_tables.py tests/test_flux_encodings.py

# What these files test without pyarrow, Ray and img2dataset is tested by `make test` too. The nodes of Slurm are namespaces:
# Debian's packages slurmctld slurmd slurm-client munge iproute2, and root; without them its tests are skipped.
test-cluster: $(STAMP)  ## runs on a Slurm of two nodes; prepare.laion, and two Ray nodes of which one dies, with pyarrow, ray and img2dataset, installed beside the environment
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest -q tests/test_slurm.py -k "$(ONLY)"
	test -e $(VENV)/$(CLUSTER) || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/$(CLUSTER) -r requirements/prepare.lock
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV))/$(CLUSTER) PATH="$(abspath $(VENV))/bin:$$PATH" \
	  bash -c '$(PY) -m pytest -q tests/test_laion.py tests/test_laion_faults.py && $(PY) -m pytest -q tests/test_engines.py tests/test_locks.py tests/test_laion_end_to_end.py -k "$(ONLY)"'

test-dashboard: $(STAMP)  ## the dashboard of W&B, with wandb-workspaces, installed beside the environment
	test -e $(VENV)/$(DASHBOARD) || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/$(DASHBOARD) -r requirements/dashboard.lock
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/$(DASHBOARD) PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest -q tests/test_wandb_dashboard.py

test-browser: $(STAMP)  ## the pages in Chromium (Debian: apt-get install chromium), with playwright, installed beside the environment
	test -e $(VENV)/$(BROWSER) || $(PY) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/$(BROWSER) -r requirements/browser.lock
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(VENV)/$(BROWSER) $(PY) -m pytest -q tests/test_browser.py -k "$(ONLY)"

test-store: $(STAMP)  ## faults of a real object store (Swift's, or moto's) while two ranks read from it; runs that resume from one
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest -q tests/store/reader_faults.py tests/store/remote_runs.py -k "$(ONLY)"

test-faults: $(STAMP)  ## a fault at each moment of a tiny run, which is started again: reports/results/faults.csv (ONLY=ROW,... for some)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m tests.faults $(if $(ONLY),only=$(ONLY) out=none)

test-health: $(STAMP)  ## two ranks of which one is stopped, slow, wrong or given other words (minutes)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest -q tests/test_health.py

$(CLOUDS)/whole: | $(STAMP)
	@$(call ALONE,$(VENV)) bash -euc 'test -e $@ || { set -x; $(PY) -m venv --without-pip $(@D); \
	  $(VENV)/bin/uv pip install -q --python $(@D)/bin/python --no-deps -r requirements/clouds.lock; touch $@; }'

test-clouds: $(CLOUDS)/whole  ## the files of launch/ as their own tools read them: hadolint, SkyPilot, Kubernetes, JobSet, in an environment of their own
	CUDA_VISIBLE_DEVICES= CLOUDS=$(CLOUDS)/bin $(PY) -m pytest -q tests/test_launch_tools.py

test-image: $(STAMP)  ## build launch/Dockerfile for real, on a bare Debian that debootstrap makes, and train in it: 30 GB of disk (Debian: apt-get install debootstrap buildah)
	bash tests/image.sh

mutants: $(STAMP)  ## small faults of the core, each against its room's tests: which are noticed (half an hour) -> reports/results/
	CUDA_VISIBLE_DEVICES= PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m tests.mutants pass=after

test-gpu:  ## on a GPU machine: the tests that need one (interpreter at hand)
	$(PYTHON) -m pytest -q tests/gpu

TO ?= .
download_assets: $(STAMP)  ## the weights and datasets of AMD's benchmark, into TO=. and the hub's cache: python -m prepare.downloads zoo
	$(PY) -m prepare.downloads zoo to=$(TO)

# Each command gives its output its name when it is whole: an interrupted make has nothing to delete.
.PRECIOUS: $(addprefix $(SHAPES)/,tars images/dataset.json moments/dataset.json reference reference.npz prompts.tsv shuffled-tars \
  shuffled-images/dataset.json shuffled/dataset.json held-out-tars held-out-images/dataset.json held-out/dataset.json \
  one_object one_object.npz drawn)

$(SHAPES)/tars:
	$(PY) -m prepare.shapes $@ num_images=8192

$(SHAPES)/images/dataset.json: | $(SHAPES)/tars
	$(PY) -m prepare.shards $(SHAPES)/tars $(@D)

$(SHAPES)/moments/dataset.json: | $(SHAPES)/images/dataset.json
	$(PY) -m prepare.latents $(SHAPES)/images $(@D) model.family=shapes image_size=32

$(SHAPES)/reference:
	$(PY) -m prepare.shapes $@ num_images=8192 part=reference layout=files

$(SHAPES)/reference.npz: | $(SHAPES)/reference
	$(PY) -m prepare.fid_statistics $(SHAPES)/reference $@ inception=families/shapes_weights/reader/model.safetensors

$(SHAPES)/prompts.tsv:
	$(PY) -m prepare.shapes $@ num_images=256 part=prompts

miniature-files: $(addprefix $(SHAPES)/,moments/dataset.json reference.npz prompts.tsv)

miniature: $(STAMP)  ## the data of demo
	@mkdir -p $(SHAPES)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory -j 2 miniature-files

# The launcher's own parting line goes to stdout after the result; it is no part of it. An interrupt is for the run alone.
define shown
$(COMPOSER) -n 1 benchmark.py $(1) run_name=$(NAME) $(KEYS) | (trap '' INT; sed -u '/^Waiting up to 30 seconds/d')
endef

demo: miniature  ## render pictures, write shards, encode and stream them, train a small network on a CPU to a target (KEYS=seed=18)
	$(call shown,yamls/shapes_muon.yaml)

flux-files: $(addprefix $(SHAPES)/,moments/dataset.json held-out/dataset.json prompts.tsv)

demo-flux: $(STAMP)  ## the same world with a small FLUX transformer, by its validation loss (KEYS=seed=18)
	@mkdir -p $(SHAPES)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory -j 2 flux-files
	$(call shown,yamls/shapes_flow.yaml)

$(SHAPES)/held-out-tars:
	$(PY) -m prepare.shapes $@ num_images=1024 part=reference

$(SHAPES)/shuffled-tars:
	$(PY) -m prepare.shapes $@ num_images=8192 captions=shuffled

# Moments of further pictures: of tars, by way of images.
FURTHER := shuffled held-out
$(FURTHER:%=$(SHAPES)/%-images/dataset.json): $(SHAPES)/%-images/dataset.json: | $(SHAPES)/%-tars
	$(PY) -m prepare.shards $(SHAPES)/$*-tars $(@D)

$(FURTHER:%=$(SHAPES)/%/dataset.json): $(SHAPES)/%/dataset.json: | $(SHAPES)/%-images/dataset.json
	$(PY) -m prepare.latents $(SHAPES)/$*-images $(@D) model.family=shapes image_size=32

$(SHAPES)/one_object:
	$(PY) -m prepare.shapes $@ num_images=8192 part=reference objects=one layout=files

$(SHAPES)/one_object.npz: | $(SHAPES)/one_object
	$(PY) -m prepare.fid_statistics $(SHAPES)/one_object $@ inception=families/shapes_weights/reader/model.safetensors

$(SHAPES)/drawn:
	$(PY) -m prepare.shapes $@ num_images=256 part=prompts layout=files

controls-files: $(addprefix $(SHAPES)/,shuffled/dataset.json one_object.npz drawn)

CONTROLS := reports/results/shapes
SCORE := $(COMPOSER) -n 1 eval.py

controls: miniature  ## what the target of demo was chosen from: AdamW with three seeds, and what has to miss it; replaces their records (an hour and more)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory controls-files
	rm -rf $(CONTROLS)/guidance $(CONTROLS)/other_world $(CONTROLS)/drawn
	$(PY) -m bench.ladder yamls/ladders/shapes.yaml runs=runs/controls
	$(SCORE) runs/controls/seed17 eval.guidance=[1,1.5,2,3,4,6,8] out=$(CONTROLS)/guidance
	$(SCORE) runs/controls/seed17 snapshots=last eval.statistics=$(SHAPES)/one_object.npz out=$(CONTROLS)/other_world
	$(SCORE) $(SHAPES)/drawn eval.statistics=$(SHAPES)/reference.npz eval.inception=families/shapes_weights/reader/model.safetensors \
	  out=$(CONTROLS)/drawn

controls-flux: $(STAMP)  ## what the target of demo-flux is chosen from: three seeds, and what has to miss it
	@mkdir -p $(SHAPES)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory flux-files $(SHAPES)/shuffled/dataset.json
	$(PY) -m bench.ladder yamls/ladders/shapes_flow.yaml

# The moving miniature: films instead of pictures.
MOVING := $(SHAPES)/moving
.PRECIOUS: $(addprefix $(MOVING)/,prompts.tsv $(foreach set,films held-out shuffled,$(set)-tars $(set)/dataset.json $(set)-moments/dataset.json))

$(MOVING)/prompts.tsv:
	$(PY) -m prepare.shapes $@ world=moving num_images=256 part=prompts

$(MOVING)/films-tars $(MOVING)/shuffled-tars $(MOVING)/held-out-tars:
	$(PY) -m prepare.shapes $@ world=moving $(if $(findstring held,$@),num_images=512 part=reference,num_images=3072) $(if $(findstring shuf,$@),captions=shuffled)

$(MOVING)/%/dataset.json: | $(MOVING)/%-tars
	$(PY) -m prepare.shards $(MOVING)/$*-tars $(@D)

$(MOVING)/%-moments/dataset.json: | $(MOVING)/%/dataset.json
	$(PY) -m prepare.latents $(MOVING)/$* $(@D) model.family=shapes model.variant=moving image_size=32 num_frames=9 batch_size=32

moving-files: $(addprefix $(MOVING)/,films-moments/dataset.json held-out-moments/dataset.json prompts.tsv)

# Of a finished run: a film of each caption that training never saw, and how many move as it says.
define drawn
$(COMPOSER) -n 1 eval.py $(1) images=$(1)/drawn prompts=$(MOVING)/prompts.tsv eval.batch_size=32 | (trap '' INT; sed -u '/^Waiting up to 30 seconds/d')
endef

demo-video: $(STAMP)  ## the same world in motion with a small Wan transformer: films, their latents, training, and where things move (KEYS=seed=18)
	@mkdir -p $(MOVING)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory -j 2 moving-files
	$(call shown,yamls/shapes_moving.yaml)
	$(call drawn,runs/$(NAME))
	$(PY) -m bench.motion videos=runs/$(NAME)/drawn results=runs/$(NAME)/motion.json

COMMA := ,
CONTROLS_MOVING := seed17 seed18 seed19 shuffled
controls-video: $(STAMP)  ## what demo-video is judged by: three seeds, and captions shuffled in training (an hour)
	@mkdir -p $(MOVING)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory -j 2 moving-files $(MOVING)/shuffled-moments/dataset.json
	$(PY) -m bench.ladder yamls/ladders/shapes_moving.yaml runs=runs/controls-video
	$(foreach run,$(CONTROLS_MOVING),$(call drawn,runs/controls-video/$(run)) && ) true
	$(PY) -m bench.motion videos=$(subst $(eval ) ,$(COMMA),$(CONTROLS_MOVING:%=runs/controls-video/%/drawn))

study-files: $(addprefix $(SHAPES)/,moments/dataset.json held-out/dataset.json reference.npz prompts.tsv)

study: $(STAMP)  ## the miniature in five kinds of numbers, at two learning rates, with three seeds (an hour and more) -> runs/sweeps/shapes_precision
	@mkdir -p $(SHAPES)
	@$(call ALONE,$(SHAPES)) $(MAKE) --no-print-directory -j 2 study-files
	OMP_NUM_THREADS=1 $(PY) sweep.py yamls/sweeps/shapes_precision.yaml jobs=2

gpu:  ## on a GPU machine: rungs of SD2, FLUX.1 and SDXL, and tests/gpu, the most telling first -> reports/results/ (BUDGET=540 seconds a call; interpreter at hand)
	$(PYTHON) -m bench.gpu $(BUDGET:%=budget_sec=%) $(LADDERS)

gpu-latency:  ## on a GPU machine: seconds from caption to image of SD2 and SD 1.5, beside diffusers' pipeline -> reports/results/ (interpreter at hand)
	$(PYTHON) -m bench.latency results=reports/results/latency_gpu.json

# Under the names of AMD's benchmark of diffusion models. DOCKER may be podman; GPU: nvidia, amd or none.
DOCKER ?= docker
GPU ?= nvidia
IMAGE ?= easel
CONTAINER ?= easel
HANDED_IN_nvidia := --gpus all
HANDED_IN_amd := --device /dev/kfd --device /dev/dri --group-add video --security-opt seccomp=unconfined
HANDED_IN_none := -e CUDA_VISIBLE_DEVICES=
HANDED_IN = $(if $(filter nvidia amd none,$(GPU)),$(HANDED_IN_$(GPU)),$(error GPU: '$(GPU)'. Possible: nvidia, amd, none))
OWN_FOLDERS := cache checkpoints datasets runs

build_docker:  ## the image of launch/Dockerfile, called $(IMAGE); GPU=amd: of launch/Dockerfile.rocm
	$(DOCKER) build -f launch/Dockerfile$(if $(filter amd,$(GPU)),.rocm) -t $(IMAGE) \
	  --build-arg EASEL_COMMIT=$$(git rev-parse HEAD)$$(git diff --quiet HEAD -- . ':!reports/results' || echo +changes) .

launch_docker:  ## start a container of it, called $(CONTAINER), with all GPUs, .env and the folders of this checkout; GPU=none: without
	mkdir -p $(OWN_FOLDERS)
	$(DOCKER) run --detach --init --name $(CONTAINER) $(HANDED_IN) --ipc=host --ulimit memlock=-1 $(if $(wildcard .env),--env-file .env) \
	  $(foreach folder,$(OWN_FOLDERS),-v "$(CURDIR)/$(folder):/easel/$(folder)") $(IMAGE) sleep infinity

build_and_launch_docker:  ## both
	$(MAKE) --no-print-directory build_docker
	$(MAKE) --no-print-directory launch_docker

exec_docker:  ## a shell in the container
	$(DOCKER) exec -it $(CONTAINER) bash

stop_docker:  ## end and remove the container
	$(DOCKER) rm -f $(CONTAINER)

report: $(STAMP)  ## write what README and docs/ show anew, from committed records: tables of keys and of figures, and all pictures
	$(PY) -m common.key_reference docs/*.md
	$(PY) -m reports.samples reports/results/shapes_samples.png reports/results/shapes_samples.txt docs/pictures/samples.png gap_px=6
	$(PY) -m reports.samples reports/results/shapes_moving_samples.png reports/results/shapes_moving_samples.txt docs/pictures/moving_four.png \
	  tile_px=526 columns=2 most=4 note="Look at the direction of motion only. Shapes and colors are not learned well."
	$(PY) -m evaluation.plots reports/results/shapes/seed17.json reports/results/shapes/seed18.json reports/results/shapes/seed19.json \
	  docs/pictures/scores.png target.fid=45 target.clip=0.895
	$(PY) -m evaluation.plots reports/results/shapes/guidance/eval.jsonl reports/results/shapes/guidance/guidance.png
	$(PY) -m reports.tables reports/results/latency_cpu.json reports/results/latency_cpu.csv
	$(PY) -m reports.tables reports/results/step.json docs/benchmarks.md
	$(PY) -m reports.tables reports/results/scale.json docs/data-and-stores.md
	$(PY) -m reports.study reports/results/shapes_algorithms_unet.json docs/pictures/algorithms_unet.png docs/algorithms.md
	$(PY) -m reports.study reports/results/shapes_algorithms.json docs/pictures/algorithms_flow.png docs/algorithms.md
	$(PY) -m scaling.report reports/results/scaling.json docs/pictures reports/results/scaling_rows.csv docs/scaling.md
	$(PY) -m reports.compare reports/results/sd2_tiny_cpu_compile/eager.json reports/results/sd2_tiny_cpu_compile/whole.json \
	  reports/results/sd2_tiny_cpu_compile/blocks.json reports/results/sd2_tiny_cpu_compile/attention_math.json docs/benchmarking.md
	@mkdir -p cache
	$(PY) -m reports.page reports/results/shapes_run out=cache/page.html

clean:  ## remove the data of demo and controls; runs stay in runs/
	rm -rf $(SHAPES)
