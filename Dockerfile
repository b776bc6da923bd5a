# docker build -t qkvflow .                                  CPU
# docker build -t qkvflow --build-arg EXTRA=cuda12 .         NVIDIA GPUs: docker run --gpus all ...
# docker run --rm -it -v "$PWD/runs:/home/runs" qkvflow train
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG EXTRA=""
# git: Levanter uses it to read the state of the working tree.
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff constraints.txt qkvflow_command.py ./
COPY configs configs
COPY qkvflow qkvflow
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRA:+[$EXTRA]}"
WORKDIR /home
ENTRYPOINT ["qkvflow"]
CMD ["--help"]
