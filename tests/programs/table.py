"""Regression on the columns of a pandas DataFrame.   mpirun -np 2 python table.py"""

import pandas
from sklearn.datasets import make_friedman1

import hvdtrain


def houses(split):
    columns, price = make_friedman1(2000, n_features=8, noise=0.5, random_state=["train", "val"].index(split))
    return pandas.DataFrame(columns, columns=[f"fact{i}" for i in range(8)]).assign(target=price)


run = hvdtrain.train(
    {"data.name": houses, "task.name": "regression", "task.objective": "r2", "model.name": "mlp", "optim.base_lr": 0.02, "epochs": 6}
)
