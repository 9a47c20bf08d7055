"""What train.py, sft.py, dpo.py and agentevol.py share: a run made of steps, options, exit codes,
and, for methods that learn from whole trajectories, play and batches."""
