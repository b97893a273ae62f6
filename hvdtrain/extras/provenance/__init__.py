"""What a job ran with, so that it can be cited and repeated: code, packages, hardware, launcher."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Records what each job ran with: code, packages, hardware, and changes not committed.",
    environment="hvdtrain.extras.provenance.environment:record",
)
