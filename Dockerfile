# The project on a CPU, in a container; the machine needs nothing but the builder.
#
#     docker build -t agent-rl .
#     docker run --rm agent-rl                                                         the commands
#     docker run --rm -it -v "$PWD/runs:/agent/runs" -v "$PWD/.cache:/agent/.cache" agent-rl train
#
# What a run leaves lies in runs/, converted models and warm starts in .cache/: mounted, both outlive the container.
FROM python:3.11-slim-bookworm

# vLLM's CPU build links against libnuma and compiles kernels with g++; tcmalloc saves memory; make runs everything. No pins: Debian drops old versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /agent
ENV PIP_NO_CACHE_DIR=1

# First what set-up reads, so that a change of the code does not install 4 GB again.
COPY Makefile requirements*.txt ./
COPY tools tools
COPY stubs stubs
COPY envs/textcraft/__init__.py envs/textcraft/
RUN make setup SET=cpu

COPY . .
# A world that needs packages of its own: --build-arg ENV=babyai
ARG ENV=textcraft
RUN make setup ENV="$ENV"
ENTRYPOINT ["make"]
CMD ["help"]
