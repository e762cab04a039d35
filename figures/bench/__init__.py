"""Programs that measure, and write what they have measured into figures/records/.

speed         tp_speed, sequence_speed, ring_speed, ulysses_speed, long_speed, mesh_speed, pipeline,
              data_speed, worker_speed, thread_speed, strategies, decoding, collectives
memory        longest (with plain_finetune), training_memory, one_step
training      pretraining_loss
who has what  diagrams, mesh_diagrams
tolerances    tolerance (with few_tokens, rounding, rounding_runs)
all at once   gpu: what one GPU can show; report: every task's checks, and the pages' tables

They share records.py, which starts a program under torchrun and keeps its record; claims.py, what
each task claims; contenders.py, how each tensor parallelism is started.
"""
