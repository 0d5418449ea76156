import torch

torch.set_num_threads(1)  # tests share small machines with each other
