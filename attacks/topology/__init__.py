"""TADI (Rangwala, Sinnott and Buyya 2026): what parameters, structure and organisation each say of a site's classes."""
