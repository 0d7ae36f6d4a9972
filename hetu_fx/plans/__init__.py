"""What a plan is: pipelines of stages, schedule, predicted costs, and its explanation. No tensors."""
