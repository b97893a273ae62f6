"""A torch Dataset with random augmentation.   mpirun -np 2 python augmented.py"""

import torch
from sklearn.datasets import load_digits
from torchvision.transforms import v2

import hvdtrain


class Digits(torch.utils.data.Dataset):
    classes = 10

    def __init__(self, split):
        images, labels = (array[:1500] if split == "train" else array[1500:] for array in load_digits(return_X_y=True))
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), labels
        self.transform = v2.RandomAffine(degrees=10, translate=(0.1, 0.1)) if split == "train" else v2.Identity()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


run = hvdtrain.train({"data.name": Digits, "model.name": "mlp", "optim.base_lr": 0.5, "epochs": 3})
