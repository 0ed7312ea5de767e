# docker build -t cadence .    for CPUs; --build-arg WHEELS=cuda for NVIDIA's GPUs (docker run --gpus all): docs/clusters.md
FROM python:3.12-slim
ARG WHEELS=cpu
# torch.compile, which vLLM and SGLang use, needs a compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /cadence
COPY . .
RUN make setup WHEELS=$WHEELS
ENV PATH=/cadence/.venv/bin:$PATH CADENCE_RESULTS=/results
VOLUME /results
ENTRYPOINT ["cadence"]
